-- Raises the fence to the token and the expiry to the ttl, if this owner still holds the lock and the key has no
-- record.
-- KEYS: lock, fence, record, and with the restart guard the generation.
-- ARGV: owner, token, ttl ms, fence retention ms, and with the restart guard the generation read.
-- Returns the fence after the write if still held, {0} if lost, {3} if this server has lost its memory since its
-- generation was read, {4, record, pttl} if there is a record, only its head if it is big.
if ARGV[5] and redis.call('GET', KEYS[4]) ~= ARGV[5] then return {3} end
local pttl = redis.call('PTTL', KEYS[3])
-- Not by its length: an empty value is foreign data, which must not be overwritten.
if pttl ~= -2 then
  local record
  if redis.call('STRLEN', KEYS[3]) > 16384 then
    record = redis.call('GETRANGE', KEYS[3], 0, 64)
  else
    record = redis.call('GET', KEYS[3])
  end
  return {4, record, pttl}
end
local values = redis.call('MGET', KEYS[1], KEYS[2])
local granted, owner = values[2], ARGV[1]
if values[1] ~= owner then return {0} end
local token, fence = tonumber(ARGV[2]), 0
if granted then
  fence = tonumber(string.match(granted, '^(%d+) '))
  if not fence then
    return redis.error_reply('WRONGTYPE the fence key holds no fence')
  end
end
if fence > token then return fence end
if fence < token then
  local raised = ARGV[2] .. ' ' .. owner
  if granted then
    redis.call('SET', KEYS[2], raised, 'PX', ARGV[4])
  elseif not redis.call('SET', KEYS[2], raised, 'PX', ARGV[4], 'NX') then
    return redis.error_reply('WRONGTYPE the fence key is not a string')
  end
else
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return token
