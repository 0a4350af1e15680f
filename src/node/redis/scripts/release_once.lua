-- Deletes a lock and its intent, each if it still belongs to this owner, who has executed nothing.
-- KEYS: lock, intent.  ARGV: owner, and 1 to notify subscribers.
-- Returns the number of subscribers, -1 if the user must not publish, -2 if nothing was published, -3 if this owner
-- does not hold the lock.
-- MGET returns nil for a key of another type: the intent is deleted even if the lock key holds foreign data.
local values = redis.call('MGET', KEYS[1], KEYS[2])
for i = 1, 2 do
  if values[i] == ARGV[1] then redis.call('DEL', KEYS[i]) end
end
if values[1] ~= ARGV[1] then return -3 end
if ARGV[2] then return notify(KEYS[1]) end
return -2
