-- Reads a record.
-- KEYS: record.
-- Answers {4, record, pttl} recorded, of a big record the head only, {0} not.
local pttl = redis.call('PTTL', KEYS[1])
if pttl == -2 then return {0} end
local record
if redis.call('STRLEN', KEYS[1]) > 16384 then
  record = redis.call('GETRANGE', KEYS[1], 0, 64)
else
  record = redis.call('GET', KEYS[1])
end
return {4, record, pttl}
