-- Deletes a lock of any owner, if it is still the owner that was seen. The fence stays, so that the next holder has a
-- higher number. All readers have the same digest, so a request that comes late, because the server was stopped, does
-- nothing: it could free those that came since.
-- KEYS: lock, readers.
-- ARGV: the digest of the value that was seen, the time of this server in ms until which to delete it, and 1 to notify
-- subscribers.
-- Returns {whether it was deleted}, or {-1} if it is too late.
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) > tonumber(ARGV[2]) then return {-1} end
local holder = redis.call('GET', KEYS[1])
if not holder or redis.sha1hex(holder) ~= ARGV[1] then return {0} end
redis.call('DEL', KEYS[1], KEYS[2])
if ARGV[3] then notify(KEYS[1]) end
return {1}
