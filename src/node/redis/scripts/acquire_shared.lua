-- Locks several keys for one reader of several, all or none. One script, so that no other client can act between the
-- checks and the writes.
-- KEYS: the locks, then their readers and then their waiting writers in the same order, then, with the restart guard,
-- the generation.
-- ARGV: owner, ttl ms, number of locks, and with the restart guard the generation read.
-- Returns 0 if granted, {0, longest pttl, what its holder shows} if an owner holds any of the locks alone or waits
-- to, {3} if this server has lost its memory since its generation was read.
if ARGV[4] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[4] then return {3} end
local owner, ttl, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now, held, shown, holders = milliseconds(), nil, '', {}
for i = 1, count do
  local holder, refused_by = redis.call('GET', KEYS[i]), nil
  holders[i] = holder
  if holder and holder ~= MARKER then
    refused_by = KEYS[i]
  elseif end_of(KEYS[count + i], owner) <= now and redis.call('GET', KEYS[2 * count + i]) then
    -- Also where the key is free: otherwise readers would overtake the writer at the servers that the last
    -- readers have left first. Foreign data is an error, and no writer.
    refused_by = KEYS[2 * count + i]
  end
  if refused_by then
    local pttl = redis.call('PTTL', refused_by)
    -- A lock without expiry lasts longest.
    if pttl < 0 then pttl = math.huge end
    if not held or held <= pttl then
      held, shown = pttl, refused_by == KEYS[i] and string.sub(holder, 33) or ''
    end
  end
end
if held then return {0, held == math.huge and -1 or held, shown} end
for i = 1, count do
  local lock, readers = KEYS[i], KEYS[count + i]
  -- Left behind by a lock that went away by other means than its readers' releases. Not deleted in vain: a server that
  -- is out of memory refuses nothing more to a script that has deleted something.
  if not holders[i] and redis.call('PTTL', readers) ~= -2 then redis.call('DEL', readers) end
  prolong(readers, owner, now, ttl)
  if not holders[i] then redis.call('SET', lock, MARKER, 'PX', ttl) end
  end_with_the_last(lock, readers)
end
return 0
