-- Locks a key whose outcome is recorded, unless it is recorded already. One script, because whoever is granted
-- the key must not execute what has been recorded in between.
-- KEYS: lock, fence, record, with intents the intent, and with the restart guard the generation.
-- ARGV: owner, proposal, ttl ms, fence retention ms, intent retention ms ('' without intents), and with the
-- restart guard the generation seen.
-- Answers the fence if granted, {0, pttl, what the holder asked for} held by another, {2} the fence is at its end,
-- {3} this server lost its memory since its generation was seen, {4, record, pttl} recorded, of a big record the
-- head only, {5} somebody was granted the key who may have executed, and recorded nothing.
if ARGV[6] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[6] then return {3} end
local pttl = redis.call('PTTL', KEYS[3])
-- Not by its length: what is there and empty is somebody else's, and not to be overwritten.
if pttl ~= -2 then
  local record
  if redis.call('STRLEN', KEYS[3]) > 16384 then
    record = redis.call('GETRANGE', KEYS[3], 0, 64)
  else
    record = redis.call('GET', KEYS[3])
  end
  return {4, record, pttl}
end
-- All is read before anything is written, and not by MGET, which shows a key of another type as missing:
-- an error must leave no intent behind.
local holder, owner = redis.call('GET', KEYS[1]), ARGV[1]
if holder and holder ~= owner then
  -- Never the first half: whoever knows it can release the lock.
  return {0, redis.call('PTTL', KEYS[1]), string.sub(holder, 33)}
end
local intents = ARGV[5] ~= ''
if intents then
  local intent = redis.call('GET', KEYS[4])
  if intent and intent ~= owner then return {5} end
end
local fence, granted = 0, redis.call('GET', KEYS[2])
if granted then
  fence = tonumber(string.match(granted, '^(%d+) '))
  if not fence then
    return redis.error_reply('WRONGTYPE the fence key holds something else')
  end
end
if holder then
  -- The fence outlives what it was granted for, as of a new lock.
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
else
  local proposal = tonumber(ARGV[2])
  if proposal > fence then fence = proposal else fence = fence + 1 end
  -- Lua numbers are doubles: beyond 2^53 two tokens could be one.
  if fence > 9007199254740000 then return {2} end
  redis.call('SET', KEYS[2], string.format('%.0f ', fence) .. owner, 'PX', ARGV[4])
  -- Before the lock, like the fence: nobody may hold the lock whose intent is not there.
  if intents then redis.call('SET', KEYS[4], owner, 'PX', ARGV[5]) end
  redis.call('SET', KEYS[1], owner, 'PX', ARGV[3])
end
return fence
