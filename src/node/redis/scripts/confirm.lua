-- Raises the fence to the token and the expiry to the ttl, if this owner still holds the lock. One script, so that
-- it returns the fence under which the lock was still held.
-- KEYS: lock, fence, and with the restart guard the generation.
-- ARGV: owner, token, ttl ms, fence retention ms, and with the restart guard the generation read.
-- Returns the fence after the write if still held, {0} if lost, {3} if this server has lost its memory since its
-- generation was read.
if ARGV[5] and redis.call('GET', KEYS[3]) ~= ARGV[5] then return {3} end
local values = redis.call('MGET', KEYS[1], KEYS[2])
local record, owner = values[2], ARGV[1]
if values[1] ~= owner then return {0} end
local token = tonumber(ARGV[2])
local fence = record and tonumber(string.match(record, '^(%d+) ')) or not record and 0
if not fence then return redis.error_reply('WRONGTYPE the fence key holds no fence') end
if fence > token then return fence end
if fence < token then
  local raised = ARGV[2] .. ' ' .. owner
  -- MGET returns nil for a key of another type; NX prevents overwriting it.
  if record then
    redis.call('SET', KEYS[2], raised, 'PX', ARGV[4])
  elseif not redis.call('SET', KEYS[2], raised, 'PX', ARGV[4], 'NX') then
    return redis.error_reply('WRONGTYPE the fence key is not a string')
  end
else
  -- No SET if nothing changes: a server that is out of memory refuses it.
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
-- Never shorten the expiry: an extension that only some nodes answer must not cut a valid lock short.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return token
