-- Deletes those of several locks that this owner still holds: a set that has lost one key must still release the
-- others. The fences stay.
-- KEYS: the locks.  ARGV: owner, and 1 to notify subscribers.
-- Returns the largest number of subscribers, -1 if the user must not publish, -2 if nothing was published, -3 if this
-- owner does not hold all of them.
local released, most = {}, -2
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i])
    released[#released + 1] = KEYS[i]
  end
end
if ARGV[2] then
  for i = 1, #released do most = math.max(most, notify(released[i])) end
end
return #released < #KEYS and -3 or most
