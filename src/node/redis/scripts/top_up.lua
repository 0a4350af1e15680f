-- Writes a record that a majority of the servers has, if this server has none, and deletes the intent, whose outcome
-- the record is: an intent that outlives the record would refuse the key.
-- KEYS: record, and with intents the intent.  ARGV: record, remaining retention ms.
-- Returns {4, head of the record that is there now, pttl}.
-- Checked first, because a server that is out of memory refuses any SET, also one that would change nothing.
if redis.call('PTTL', KEYS[1]) == -2 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  -- MGET returns nil for a key of another type. Any owner's, but no foreign data.
  local intent = KEYS[2] and redis.call('MGET', KEYS[2])[1]
  if intent and string.find(intent, '^' .. string.rep('%x', 32)) then redis.call('DEL', KEYS[2]) end
end
return {4, redis.call('GETRANGE', KEYS[1], 0, 64), redis.call('PTTL', KEYS[1])}
