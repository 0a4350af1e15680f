-- Writes a record and releases the lock, if there is no record and no other owner was granted the lock here since.
-- One script, because a record that is written after another grant would let both owners execute.
-- KEYS: lock, fence, record, and with intents the intent.
-- ARGV: owner, record, retention ms, and 1 to notify subscribers.
-- Returns {4, head of the record, pttl} if there is a record now, this or another one, {0} if another owner was
-- granted the lock, or this server has forgotten the grant.
local pttl = redis.call('PTTL', KEYS[3])
-- Not by its length: an empty value is foreign data, which must not be overwritten.
if pttl ~= -2 then return {4, redis.call('GETRANGE', KEYS[3], 0, 64), pttl} end
-- MGET returns nil for a key of another type: it is not this owner's, and causes no error between the writes.
local values, owner = redis.call('MGET', unpack(KEYS)), ARGV[1]
-- The last grantee, not the holder: an execution that outlived its lock may be recorded if no grant followed.
local granted = values[2]
if not granted or string.match(granted, '^%d+ (.*)$') ~= owner then return {0} end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
if values[1] == owner then redis.call('DEL', KEYS[1]) end
if values[4] == owner then redis.call('DEL', KEYS[4]) end
if ARGV[4] and values[1] == owner then notify(KEYS[1]) end
return {4, string.sub(ARGV[2], 1, 65), tonumber(ARGV[3])}
