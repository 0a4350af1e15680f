-- Raises the fences of several keys to the token and their expiry to the ttl, if this owner still holds all
-- locks. One script, because one lost key loses the set, so they must be checked together.
-- KEYS: the locks, then, with fencing, their fences in the same order, then, with the restart guard, the
-- generation.
-- ARGV: owner, token ('' without fencing), ttl ms, fence retention ms, number of locks, and with the restart
-- guard the generation read.
-- Returns the fence after the write if still held, {0} if lost, {3} if this server has lost its memory since its
-- generation was read.
if ARGV[6] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[6] then return {3} end
local owner, count = ARGV[1], tonumber(ARGV[5])
for i = 1, count do
  if redis.call('GET', KEYS[i]) ~= owner then return {0} end
end
if ARGV[2] ~= '' then
  local token, fence, at_token = tonumber(ARGV[2]), 0, {}
  for i = count + 1, 2 * count do
    local record = redis.call('GET', KEYS[i])
    local number = record and tonumber(string.match(record, '^(%d+) '))
    if record and not number then
      return redis.error_reply('WRONGTYPE the fence key holds no fence')
    end
    number = number or 0
    at_token[i] = number == token
    if number > fence then fence = number end
  end
  if fence > token then return fence end
  for i = count + 1, 2 * count do
    if at_token[i] then
      redis.call('PEXPIRE', KEYS[i], ARGV[4])
    else
      redis.call('SET', KEYS[i], ARGV[2] .. ' ' .. owner, 'PX', ARGV[4])
    end
  end
end
for i = 1, count do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[3]) then
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
  end
end
return tonumber(ARGV[2]) or 0
