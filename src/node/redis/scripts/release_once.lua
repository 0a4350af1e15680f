-- Deletes a lock, and the intent of its owner, if they are still this owner's: nothing was executed.
-- KEYS: lock, intent.  ARGV: owner, and 1 if others are to be told.
-- Answers to how many it was told, -1 if it must not be, -2 if there was nothing to tell.
-- MGET shows a key of another type as missing: the intent is given back whatever became of the lock.
local values = redis.call('MGET', KEYS[1], KEYS[2])
for i = 1, 2 do
  if values[i] == ARGV[1] then redis.call('DEL', KEYS[i]) end
end
if ARGV[2] and values[1] == ARGV[1] then return tell(KEYS[1]) end
return -2
