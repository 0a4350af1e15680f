-- Deletes the locks that their owners still hold, and notifies the subscribers of each.
-- KEYS: locks.  ARGV: the owner of each.
-- Returns 1 if all were deleted; otherwise for each lock 1 if it was deleted, or 0.
local owners = redis.call('MGET', unpack(KEYS))
local deleted, results = {}, {}
for i, lock in ipairs(KEYS) do
  if owners[i] == ARGV[i] then
    deleted[#deleted + 1] = lock
    results[i] = 1
  else
    results[i] = 0
  end
end
if #deleted == 0 then return results end
redis.call('DEL', unpack(deleted))
-- By pcall: the locks are released even if the user must not publish.
local subscribers = redis.pcall('PUBSUB', 'NUMSUB', unpack(deleted))
for i = 2, #subscribers, 2 do
  if subscribers[i] > 0 then redis.pcall('PUBLISH', subscribers[i - 1], subscribers[i]) end
end
if #deleted == #KEYS then return 1 end
return results
