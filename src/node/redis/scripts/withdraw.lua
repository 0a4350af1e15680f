-- Lets readers in again, if this owner is the one that waits.
-- KEYS: the waiting writers.  ARGV: owner.
-- Returns 0.
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) end
end
return 0
