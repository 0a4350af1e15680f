-- Deletes a lock if it is still this owner's. One script, because another client may be granted the lock
-- between the look and the deletion. The fence stays: it must never fall.
-- KEYS: lock.  ARGV: owner, and 1 if others are to be told.
-- Answers to how many it was told, -1 if it must not be, -2 if there was nothing to tell.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -2 end
redis.call('DEL', KEYS[1])
if ARGV[2] then return tell(KEYS[1]) end
return -2
