-- Reads this server's generation, and begins a new one if there is none or it is another process's. One
-- script, so that the stamp is the server's own: a time that is read before a separate write would let a
-- server that is wiped in between look old at once.
-- KEYS: generation.  ARGV: random bits, run id of the process.
-- Answers {generation, seconds, microseconds}, the last two by the server's clock now. A generation is
-- random bits, the seconds and microseconds of its beginning, and the run id, with colons between.
local generation, now = redis.call('GET', KEYS[1]), redis.call('TIME')
if not generation or string.match(generation, ':([^:]*)$') ~= ARGV[2] then
  generation = ARGV[1] .. ':' .. now[1] .. ':' .. now[2] .. ':' .. ARGV[2]
  redis.call('SET', KEYS[1], generation)
end
return {generation, now[1], now[2]}
