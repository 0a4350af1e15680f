-- Keeps a record that a majority of the servers has, if there is none here.
-- KEYS: record.  ARGV: record, retention ms: what is left of its time.
-- Answers {4, head of the record that is kept, pttl}.
-- Looked at first: a server that is out of memory refuses any SET, also one that would change nothing.
if redis.call('PTTL', KEYS[1]) == -2 then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return {4, redis.call('GETRANGE', KEYS[1], 0, 64), redis.call('PTTL', KEYS[1])}
