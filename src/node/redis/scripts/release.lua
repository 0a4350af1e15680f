-- Deletes a lock if it is still this owner's. One script, because another client may be granted the lock
-- between the look and the deletion. The fence stays: it must never fall.
-- KEYS: lock.  ARGV: owner.
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return {1}
