-- Deletes those of several locks that are still this owner's, each by itself: a set that lost one key must
-- still give back the others. The fences stay.
-- KEYS: the locks.  ARGV: owner, and 1 if others are to be told.
-- Answers {1}, and to how many it was told at most.
local most
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) else KEYS[i] = false end
end
for i = 1, ARGV[2] and #KEYS or 0 do
  if KEYS[i] then most = math.max(most or -1, tell(KEYS[i])) end
end
return {1, most}
