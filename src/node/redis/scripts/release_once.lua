-- Deletes a lock, and the intent of its owner, if they are still this owner's: nothing was executed.
-- KEYS: lock, intent.  ARGV: owner.
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
return {1}
