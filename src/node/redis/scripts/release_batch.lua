-- Deletes several locks, each if its owner still holds it, as release.lua does for one lock.
-- KEYS: the locks.  ARGV: 1 to notify subscribers, or '', then the owner of each lock.
-- Returns what release.lua returns for each lock, one number if that is the same for all. MGET returns nil for a key
-- of another type, which is no error here: it must not keep the others from being released.
local holders = redis.call('MGET', unpack(KEYS))
local released, places, answers = {}, {}, {}
for i = 1, #KEYS do
  answers[i] = -3
  if holders[i] == ARGV[i + 1] then
    answers[i] = -2
    released[#released + 1] = KEYS[i]
    places[#released] = i
  end
end
if #released == 0 then return -3 end
redis.call('DEL', unpack(released))
local same = #released == #KEYS
if ARGV[1] == '' then return same and -2 or answers end
-- After the deletion, and by pcall: the locks are released even if the user must not publish.
local subscribers = redis.pcall('PUBSUB', 'NUMSUB', unpack(released))
for i = 1, #released do
  local count = subscribers.err and -1 or subscribers[2 * i]
  if count > 0 and type(redis.pcall('PUBLISH', released[i], count)) == 'table' then count = -1 end
  answers[places[i]] = count
  same = same and count == answers[1]
end
return same and answers[1] or answers
