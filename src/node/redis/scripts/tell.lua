-- Tells those who wait for a lock that it is released, and answers to how many; -1 if it must not.
-- After the deletion, and by pcall: a lock is released all the same if this user may not publish.
local function tell(lock)
  local listeners = redis.pcall('PUBSUB', 'NUMSUB', lock)
  if listeners.err then return -1 end
  if listeners[2] == 0 then return 0 end
  local told = redis.pcall('PUBLISH', lock, listeners[2])
  if type(told) == 'table' then return -1 end
  return listeners[2]
end
