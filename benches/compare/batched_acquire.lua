-- Locks many keys and raises their fences, with the values of all keys read by one command.
-- KEYS: all locks, then all fences.
-- ARGV: ttl ms, fence retention ms, then for each lock its owner and its proposal of 16 digits.
-- Returns 1 if every lock was granted with its proposal; otherwise the fence of each lock, 0 if it was refused.
local count = #KEYS / 2
local values = redis.call('MGET', unpack(KEYS))
local fences, as_proposed = {}, true
for i = 1, count do
  local record, owner, digits = values[count + i], ARGV[2 * i + 1], ARGV[2 * i + 2]
  local last, fence = 0, tonumber(digits)
  if record then last = tonumber(string.sub(record, 1, 16)) end
  if last and last >= fence then
    as_proposed, fence = false, last + 1
    digits = string.format('%016.0f', fence)
  end
  -- A held lock, a fence that is none, or a fence at its maximum.
  if values[i] or not last or fence > 9007199254740000 then
    as_proposed, fence = false, 0
  else
    -- MGET returns nil for a key of another type; NX prevents overwriting it.
    local raised, set = digits .. ' ' .. owner, nil
    if record then
      set = redis.call('SET', KEYS[count + i], raised, 'PX', ARGV[2])
    else
      set = redis.call('SET', KEYS[count + i], raised, 'PX', ARGV[2], 'NX')
    end
    if not set or not redis.call('SET', KEYS[i], owner, 'PX', ARGV[1], 'NX') then
      as_proposed, fence = false, 0
    end
  end
  fences[i] = fence
end
if as_proposed then return 1 end
return fences
