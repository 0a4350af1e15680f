-- Reads a record, however big it is.
-- KEYS: record.
-- Answers {4, record, pttl} recorded, {0} not.
local record = redis.call('GET', KEYS[1])
if not record then return {0} end
return {4, record, redis.call('PTTL', KEYS[1])}
