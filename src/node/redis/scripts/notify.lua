-- Publishes the release of a lock to its subscribers. Returns their number, or -1 if the user must not publish.
-- After the deletion, and by pcall: the lock is released even if the user must not publish.
local function notify(lock)
  local subscribers = redis.pcall('PUBSUB', 'NUMSUB', lock)
  if subscribers.err then return -1 end
  if subscribers[2] == 0 then return 0 end
  local published = redis.pcall('PUBLISH', lock, subscribers[2])
  if type(published) == 'table' then return -1 end
  return subscribers[2]
end
