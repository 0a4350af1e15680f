-- Locks several keys, each for its own owner, as acquire.lua does for one key. One call, because a server takes much
-- longer for many calls.
-- KEYS: the lock and the fence of each key, then, with the restart guard, the generation.
-- ARGV: ttl ms, fence retention ms, the generation read ('' without it), then the owner and the proposal for each key.
-- Returns 1 if the fence of each key is its proposal now, and its lock granted; {3} if this server has lost its
-- memory since its generation was read; else what acquire.lua returns for each key, which may be an error.
local values = redis.call('MGET', unpack(KEYS))
if ARGV[3] ~= '' and values[#KEYS] ~= ARGV[3] then return {3} end
local ttl, retention = ARGV[1], ARGV[2]
-- From here on by pcall: an error of one key must not hide what became of the others.
local function acquire(i)
  local holder, record = values[2 * i - 1], values[2 * i]
  local owner, proposal = ARGV[2 * i + 2], ARGV[2 * i + 3]
  if holder and holder ~= owner then
    local pttl = redis.pcall('PTTL', KEYS[2 * i - 1])
    return type(pttl) == 'number' and {0, pttl, holder == 'shared' and 1 or string.sub(holder, 33)} or pttl
  end
  local fence = 0
  if record then
    -- Nearly all fences have sixteen digits, and an owner of 32 characters or more behind them; a pattern takes
    -- longer. Without the length, a foreign number would be a fence.
    fence = #record > 48 and tonumber(string.sub(record, 1, 16))
      or tonumber(string.match(record, '^(%d+) '))
    if not fence then
      return redis.error_reply('WRONGTYPE the fence key holds no fence')
    end
  end
  if holder then
    local kept = redis.pcall('PEXPIRE', KEYS[2 * i], retention)
    return type(kept) == 'number' and fence or kept
  end
  local raised
  if tonumber(proposal) > fence then
    fence, raised = tonumber(proposal), proposal .. ' ' .. owner
  else
    fence = fence + 1
    raised = string.format('%.0f ', fence) .. owner
  end
  -- See acquire.lua, also for the order.
  if fence > 9007199254740000 then return {2} end
  local set
  if record then
    set = redis.pcall('SET', KEYS[2 * i], raised, 'PX', retention)
  else
    set = redis.pcall('SET', KEYS[2 * i], raised, 'PX', retention, 'NX')
  end
  if set and set.ok then
    set = redis.pcall('SET', KEYS[2 * i - 1], owner, 'PX', ttl, 'NX')
  end
  if not set then
    return redis.error_reply('WRONGTYPE the lock or fence key is not a string')
  end
  return set.ok and fence or set
end
return answer_each(acquire)
