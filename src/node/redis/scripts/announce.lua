-- Keeps new readers out of the locks that readers hold, because an owner waits to hold them alone.
-- KEYS: the locks, then their waiting writers in the same order.  ARGV: owner, patience ms.
-- Returns 0.
for i = 1, #KEYS / 2 do
  if redis.call('GET', KEYS[i]) == MARKER then
    -- An error for foreign data, which must not be overwritten.
    redis.call('GET', KEYS[#KEYS / 2 + i])
    redis.call('SET', KEYS[#KEYS / 2 + i], ARGV[1], 'PX', ARGV[2])
  end
end
return 0
