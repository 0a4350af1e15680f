-- Confirms the locks of several keys, each for its own owner, as confirm.lua does for one key.
-- KEYS: the lock and the fence of each key, then, with the restart guard, the generation.
-- ARGV: ttl ms, fence retention ms, the generation read ('' without it), then the owner and the token for each key.
-- Returns 1 if the fence of each key is its token now, and its lock still held; {3} if this server has lost its
-- memory since its generation was read; else what confirm.lua returns for each key, which may be an error.
local values = redis.call('MGET', unpack(KEYS))
if ARGV[3] ~= '' and values[#KEYS] ~= ARGV[3] then return {3} end
local ttl, retention = ARGV[1], ARGV[2]
-- From here on by pcall: an error of one key must not hide what became of the others.
local function confirm(i)
  local lock, fenced, record = KEYS[2 * i - 1], KEYS[2 * i], values[2 * i]
  local owner, token = ARGV[2 * i + 2], tonumber(ARGV[2 * i + 3])
  if values[2 * i - 1] ~= owner then return {0} end
  local fence = record and tonumber(string.match(record, '^(%d+) ')) or not record and 0
  if not fence then return redis.error_reply('WRONGTYPE the fence key holds no fence') end
  if fence > token then return fence end
  local kept
  if fence == token then
    -- No SET if nothing changes: a server that is out of memory refuses it.
    kept = redis.pcall('PEXPIRE', fenced, retention)
  elseif record then
    kept = redis.pcall('SET', fenced, ARGV[2 * i + 3] .. ' ' .. owner, 'PX', retention)
  else
    kept = redis.pcall('SET', fenced, ARGV[2 * i + 3] .. ' ' .. owner, 'PX', retention, 'NX')
    if not kept then
      return redis.error_reply('WRONGTYPE the fence key is not a string')
    end
  end
  if type(kept) == 'table' and kept.err then return kept end
  -- Never shorten the expiry; see confirm.lua.
  local pttl = redis.pcall('PTTL', lock)
  if type(pttl) == 'number' and pttl < tonumber(ttl) then
    pttl = redis.pcall('PEXPIRE', lock, ttl)
  end
  return type(pttl) == 'number' and token or pttl
end
return answer_each(confirm)
