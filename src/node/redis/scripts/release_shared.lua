-- Takes a reader away from its locks. The last one frees them; the others are left with the end of the longest.
-- KEYS: the locks, then their readers in the same order.  ARGV: owner, and 1 to notify subscribers.
-- Returns the number of subscribers, -1 if the user must not publish, -2 if nothing was published, -3 if it does not
-- hold all of them.
local count, most, lost = #KEYS / 2, -2, false
for i = 1, count do
  local lock, readers = KEYS[i], KEYS[count + i]
  -- The release of an owner that is no reader touches nothing.
  if redis.call('ZREM', readers, ARGV[1]) == 1 and redis.call('GET', lock) == MARKER then
    redis.call('ZREMRANGEBYSCORE', readers, '-inf', string.format('%.0f', milliseconds()))
    if not end_with_the_last(lock, readers) and ARGV[2] then
      most = math.max(most, notify(lock))
    end
  else
    lost = true
  end
end
return lost and -3 or most
