-- Deletes a lock of any owner. The fence stays, so that the next holder has a higher number. A request that comes
-- late, because the server was stopped, does nothing: by now, the key may belong to another holder.
-- KEYS: lock, readers.  ARGV: the time of this server in ms until which to do it, and 1 to notify subscribers.
-- Returns {whether the lock was held}, or {-1} if it is too late.
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) > tonumber(ARGV[1]) then return {-1} end
local was_held = redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[2])
if was_held == 1 and ARGV[2] then notify(KEYS[1]) end
return {was_held}
