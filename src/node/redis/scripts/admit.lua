-- Reads this server's generation, and starts a new one if there is none or another process started it. One
-- script, so that the time stamp belongs to this memory: with a separate read of the clock, a server that is
-- flushed in between would look old at once.
-- KEYS: generation.  ARGV: random bits, run id of the process, in cluster mode with the epoch of its slots.
-- Returns {generation, seconds, microseconds}, the last two from the server's clock. A generation consists of
-- random bits, the seconds and microseconds of its start, and the run id, separated by colons.
local generation, now = redis.call('GET', KEYS[1]), redis.call('TIME')
if not generation or string.match(generation, ':([^:]*)$') ~= ARGV[2] then
  generation = ARGV[1] .. ':' .. now[1] .. ':' .. now[2] .. ':' .. ARGV[2]
  redis.call('SET', KEYS[1], generation)
end
return {generation, now[1], now[2]}
