-- Locks one key and raises its fence. One script, so that no other client can act between the check and the two
-- writes.
-- KEYS: lock, fence, and with the restart guard the generation.
-- ARGV: owner, proposal, ttl ms, fence retention ms, and with the restart guard the generation read.
-- Returns the fence if granted, {0, pttl, what the holder shows} if held by another owner, {0, pttl, 1} if held by
-- readers, {2} if the fence is at its maximum, {3} if this server has lost its memory since its generation was read.
if ARGV[5] and redis.call('GET', KEYS[3]) ~= ARGV[5] then return {3} end
local values = redis.call('MGET', KEYS[1], KEYS[2])
local holder, record, owner = values[1], values[2], ARGV[1]
if holder and holder ~= owner then
  -- Never the first half: a client that knows it can release the lock.
  return {0, redis.call('PTTL', KEYS[1]), holder == 'shared' and 1 or string.sub(holder, 33)}
end
local fence = record and tonumber(string.match(record, '^(%d+) ')) or not record and 0
if not fence then return redis.error_reply('WRONGTYPE the fence key holds no fence') end
if holder then
  -- The fence must outlive the lock, as after a new acquisition.
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
else
  local proposal = tonumber(ARGV[2])
  if proposal > fence then fence = proposal else fence = fence + 1 end
  -- Lua numbers are doubles: beyond 2^53, two tokens could be equal.
  if fence > 9007199254740000 then return {2} end
  -- Not tostring(), which prints large numbers with an exponent and drops their last digits.
  local raised = string.format('%.0f ', fence) .. owner
  -- Fence first: if the script is killed in between, it leaves a raised fence and not a lock without one.
  -- MGET returns nil for a key of another type; NX prevents overwriting it.
  local set
  if record then
    set = redis.call('SET', KEYS[2], raised, 'PX', ARGV[4])
  else
    set = redis.call('SET', KEYS[2], raised, 'PX', ARGV[4], 'NX')
  end
  if not set or not redis.call('SET', KEYS[1], owner, 'PX', ARGV[3], 'NX') then
    return redis.error_reply('WRONGTYPE the lock or fence key is not a string')
  end
end
return fence
