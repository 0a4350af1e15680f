-- Releases those locks that this owner still holds, at once or after a while: until then they stay taken, and no other
-- client can tell them from held ones. A set that has lost one key must still release the others. The fences stay.
-- KEYS: the locks.
-- ARGV: owner, how long the locks stay taken in ms (0 to free them), and, to notify subscribers, the channel of each
-- lock.
-- Returns the largest number of subscribers, -1 if the user must not publish, -2 if nothing was published, -3 if this
-- owner does not hold all of them.
local left, freed, most, lost = tonumber(ARGV[2]), {}, -2, false
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    if left > 0 then
      redis.call('PEXPIRE', KEYS[i], left)
    else
      redis.call('DEL', KEYS[i])
      freed[#freed + 1] = ARGV[2 + i]
    end
  else
    lost = true
  end
end
for i = 1, #freed do most = math.max(most, notify(freed[i])) end
return lost and -3 or most
