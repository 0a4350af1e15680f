-- Reads what a server knows of a key, and changes nothing. Never the owner, with whose value the lock can be released,
-- but its digest.
-- KEYS: lock, readers, fence, record.
-- Returns whether the lock is held, its pttl, the number of readers (-1 if they do not hold it), the fence (-1 if there
-- is none), the length of the record (0 if there is none), the time of this server in ms, the digest of the value
-- (empty if the lock is free), and what the holders show, of 16 readers at most.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holder, readers, number, holders = redis.call('GET', KEYS[1]), -1, nil, {}
if holder == 'shared' then
  readers = redis.call('ZCOUNT', KEYS[2], string.format('(%.0f', now), '+inf')
  -- Those whose locks have ended have the lowest scores.
  if readers > 0 then holders = redis.call('ZREVRANGE', KEYS[2], 0, math.min(readers, 16) - 1) end
elseif holder then
  holders = {holder}
end
for i = 1, #holders do holders[i] = string.sub(holders[i], 33) end
local fence = redis.call('GET', KEYS[3])
if fence then
  number = tonumber(string.match(fence, '^(%d+) '))
  if not number then return redis.error_reply('WRONGTYPE the fence key holds no fence') end
end
local left, record = redis.call('PTTL', KEYS[1]), redis.call('STRLEN', KEYS[4])
local digest = holder and redis.sha1hex(holder) or ''
return {holder and 1 or 0, left, readers, number or -1, record, now, digest, holders}
