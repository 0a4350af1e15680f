-- The beginning of the scripts for locks that readers share, which are appended to this one. While readers hold a
-- lock, its value is a constant, so that every owner finds it held, also an owner of another Redlock client. The
-- readers are the members of a sorted set, whose scores are the ends of their locks by this server's clock.
local MARKER = 'shared'

local function milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns when the lock of a reader ends; 0 if it has none.
local function end_of(readers, owner)
  return tonumber(redis.call('ZSCORE', readers, owner) or 0)
end

-- Adds a reader, or moves its end. Never to an earlier one: the reader may rely on the later.
local function prolong(readers, owner, now, ttl)
  local last = math.max(end_of(readers, owner), now + ttl)
  -- First, because a server that is out of memory refuses it, and only before the script has written something.
  redis.call('ZADD', readers, string.format('%.0f', last), owner)
  redis.call('ZREMRANGEBYSCORE', readers, '-inf', string.format('%.0f', now))
end

-- Ends a lock with the last of its readers. Returns false if there is none: the lock is gone.
-- The expiry is absolute, because the clock may move on between TIME and an expiry that begins now. The readers are
-- kept a second longer: a release that does not find its reader must not free a lock that others read under.
local function end_with_the_last(lock, readers)
  local last = redis.call('ZREVRANGE', readers, 0, 0, 'WITHSCORES')[2]
  if not last then
    redis.call('DEL', lock, readers)
    return false
  end
  redis.call('PEXPIREAT', lock, string.format('%.0f', last))
  redis.call('PEXPIREAT', readers, string.format('%.0f', last + 1000))
  return true
end
