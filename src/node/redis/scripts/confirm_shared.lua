-- Extends the locks of one reader, if it still has all of them. One script, so that no other client can act between
-- the checks and the writes.
-- KEYS: the locks, then their readers in the same order, then, with the restart guard, the generation.
-- ARGV: owner, ttl ms, number of locks, and with the restart guard the generation read.
-- Returns 0 if extended, {0} if lost, {3} if this server has lost its memory since its generation was read.
if ARGV[4] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[4] then return {3} end
local owner, ttl, count, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), milliseconds()
for i = 1, count do
  if redis.call('GET', KEYS[i]) ~= MARKER or end_of(KEYS[count + i], owner) <= now then return {0} end
end
for i = 1, count do
  prolong(KEYS[count + i], owner, now, ttl)
  end_with_the_last(KEYS[i], KEYS[count + i])
end
return 0
