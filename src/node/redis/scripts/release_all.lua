-- Deletes those of several locks that are still this owner's, each by itself: a set that lost one key must
-- still give back the others. The fences stay.
-- KEYS: the locks.  ARGV: owner, and 1 if others are to be told.
-- Answers to how many it was told at most, -1 if it must not be, -2 if there was nothing to tell.
local released, most = {}, -2
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i])
    released[#released + 1] = KEYS[i]
  end
end
if ARGV[2] then
  for i = 1, #released do most = math.max(most, tell(released[i])) end
end
return most
