-- Deletes those of several locks that are still this owner's, each by itself: a set that lost one key must
-- still give back the others. The fences stay.
-- KEYS: the locks.  ARGV: owner.
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) end
end
return {1}
