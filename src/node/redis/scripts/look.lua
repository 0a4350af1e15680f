-- Reads a record.
-- KEYS: record.
-- Returns {4, record, pttl}, only the head of a big record, or {0} if there is none.
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -2 then return {0} end
local record
if redis.call('STRLEN', KEYS[1]) > 16384 then
  record = redis.call('GETRANGE', KEYS[1], 0, 64)
else
  record = redis.call('GET', KEYS[1])
end
return {4, record, pttl}
