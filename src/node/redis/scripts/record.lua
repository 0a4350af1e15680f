-- Keeps a record and gives the lock back, if there is no record and nobody else was granted the lock here since.
-- One script: a record that is written after another's grant would let both execute.
-- KEYS: lock, fence, record, and with intents the intent.
-- ARGV: owner, record, retention ms, and 1 if those who wait are to be told.
-- Answers {4, record, pttl} recorded, this or another one, of a big one the head only, {0} somebody else was
-- granted the lock, or that was forgotten.
local pttl = redis.call('PTTL', KEYS[3])
-- Not by its length: what is there and empty is somebody else's, and not to be overwritten.
if pttl ~= -2 then return {4, redis.call('GETRANGE', KEYS[3], 0, 64), pttl} end
-- MGET shows a key of another type as missing: it is not this owner's, and there is no error half-way.
local values, owner = redis.call('MGET', unpack(KEYS)), ARGV[1]
-- The last grantee and not the holder: what took longer than its lock may record if nobody came after it.
local granted = values[2]
if not granted or string.match(granted, '^%d+ (.*)$') ~= owner then return {0} end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
if values[1] == owner then redis.call('DEL', KEYS[1]) end
if values[4] == owner then redis.call('DEL', KEYS[4]) end
if ARGV[4] and values[1] == owner then tell(KEYS[1]) end
return {4, string.sub(ARGV[2], 1, 65), tonumber(ARGV[3])}
