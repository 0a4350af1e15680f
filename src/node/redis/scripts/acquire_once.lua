-- Locks a key with records, unless it has a record already. One script, because a client that is granted the lock
-- must not execute an operation that was recorded in between.
-- KEYS: lock, fence, record, with intents the intent, and with the restart guard the generation.
-- ARGV: owner, proposal, ttl ms, fence retention ms, intent retention ms ('' without intents), and with the
-- restart guard the generation read.
-- Returns the fence if granted, {0, pttl, what the holder shows} if held by another owner, {0, pttl, 1} if readers
-- hold it, {2} if the fence is at its maximum, {3} if this server has lost its memory since its generation was read,
-- {4, record, pttl} if there is a record, only its head if it is big, {5} if an earlier holder may have executed
-- without leaving a record.
if ARGV[6] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[6] then return {3} end
local record = find_record(KEYS[3])
if record then return record end
-- Read everything before the first write, and not by MGET, which returns nil for a key of another type: an error
-- must leave no intent behind.
local holder, owner = redis.call('GET', KEYS[1]), ARGV[1]
if holder and holder ~= owner then
  if holder == 'shared' then return {0, redis.call('PTTL', KEYS[1]), 1} end
  -- Never the first half: a client that knows it can release the lock.
  return {0, redis.call('PTTL', KEYS[1]), string.sub(holder, 33)}
end
local intents = ARGV[5] ~= ''
if intents then
  local intent = redis.call('GET', KEYS[4])
  if intent and intent ~= owner then return {5} end
end
local fence = parse_fence(redis.call('GET', KEYS[2]))
if not fence then return redis.error_reply('WRONGTYPE the fence key holds no fence') end
if holder then
  -- The fence must outlive the lock, as after a new acquisition.
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  return fence
end
local proposal = tonumber(ARGV[2])
if proposal > fence then fence = proposal else fence = fence + 1 end
-- See acquire.lua.
if fence > 9007199254740000 then return {2} end
redis.call('SET', KEYS[2], string.format('%.0f ', fence) .. owner, 'PX', ARGV[4])
-- Before the lock, like the fence: every holder must have an intent.
if intents then redis.call('SET', KEYS[4], owner, 'PX', ARGV[5]) end
redis.call('SET', KEYS[1], owner, 'PX', ARGV[3])
return fence
