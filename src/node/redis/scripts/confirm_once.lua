-- Raises the fence to the token and the expiry to the ttl, if this owner still holds the lock and the key has no
-- record.
-- KEYS: lock, fence, record, and with the restart guard the generation.
-- ARGV: owner, token, ttl ms, fence retention ms, and with the restart guard the generation read.
-- Returns the fence after the write if still held, {0} if lost, {3} if this server has lost its memory since its
-- generation was read, {4, record, pttl} if there is a record, only its head if it is big.
if ARGV[5] and redis.call('GET', KEYS[4]) ~= ARGV[5] then return {3} end
local record = find_record(KEYS[3])
if record then return record end
local values = redis.call('MGET', KEYS[1], KEYS[2])
local granted, owner = values[2], ARGV[1]
if values[1] ~= owner then return {0} end
local token, fence = tonumber(ARGV[2]), parse_fence(granted)
if not fence then return redis.error_reply('WRONGTYPE the fence key holds no fence') end
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
