-- Writes a record that a majority of the servers has, if this server has none.
-- KEYS: record.  ARGV: record, remaining retention ms.
-- Returns {4, head of the record that is there now, pttl}.
-- Checked first, because a server that is out of memory refuses any SET, also one that would change nothing.
if redis.call('PTTL', KEYS[1]) == -2 then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return {4, redis.call('GETRANGE', KEYS[1], 0, 64), redis.call('PTTL', KEYS[1])}
