-- Deletes a lock if this owner still holds it. One script, because another client may be granted the lock between
-- the check and the deletion. The fence stays: it must never fall.
-- KEYS: lock.  ARGV: owner, and 1 to notify subscribers.
-- Returns the number of subscribers, -1 if the user must not publish, -2 if nothing was published, -3 if this owner
-- does not hold the lock.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -3 end
redis.call('DEL', KEYS[1])
if ARGV[2] then return notify(KEYS[1]) end
return -2
