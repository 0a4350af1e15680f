-- Locks several keys, all or none, and raises all their fences to one number. One script, because a partly
-- acquired set would block other clients without being granted.
-- KEYS: the locks, then, with fencing, their fences in the same order, then, with the restart guard, the
-- generation. The locks may be one slot of several: then all slots of each key come before the generation.
-- ARGV: owner, proposal ('' without fencing), ttl ms, fence retention ms, number of locks, number of slots of each
-- key, and with the restart guard the generation read.
-- Returns the fence if granted, {0, longest pttl, what its holder shows} if another owner holds any of them,
-- {0, longest pttl, 1} if readers do, {2} if a fence is at its maximum, {3} if this server has lost its memory since
-- its generation was read. A slot that is held is answered {0, pttl of the slot that ends first, '1' for each free
-- slot and '0' for the others}.
if ARGV[7] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[7] then return {3} end
local owner, count, slots = ARGV[1], tonumber(ARGV[5]), tonumber(ARGV[6])
local held, shared, shown, free = nil, nil, '', {}
for i = 1, count do
  local holder = redis.call('GET', KEYS[i])
  if not holder then
    free[#free + 1] = KEYS[i]
  elseif holder ~= owner then
    local pttl = redis.call('PTTL', KEYS[i])
    -- A lock without expiry lasts longest.
    if pttl < 0 then pttl = math.huge end
    if not held or held <= pttl then held, shown = pttl, string.sub(holder, 33) end
    if holder == 'shared' then shared = 1 end
  end
end
if held and slots > 0 then
  local before, free_slots, soonest = #KEYS - count * slots - (ARGV[7] and 1 or 0), {}, math.huge
  for slot = 1, slots do
    -- Of several keys, a slot is free if it is for each key.
    local last = 0
    for key = 0, count - 1 do
      local pttl = redis.call('PTTL', KEYS[before + key * slots + slot])
      if pttl == -1 then last = math.huge elseif pttl ~= -2 then last = math.max(last, pttl, 1) end
    end
    free_slots[slot] = last == 0 and '1' or '0'
    soonest = math.min(soonest, last)
  end
  return {0, soonest == math.huge and -1 or soonest, table.concat(free_slots)}
end
if held then return {0, held == math.huge and -1 or held, shared or shown} end
local fence = 0
if ARGV[2] ~= '' then
  for i = count + 1, 2 * count do
    local record = redis.call('GET', KEYS[i])
    if record then
      local number = tonumber(string.match(record, '^(%d+) '))
      if not number then return redis.error_reply('WRONGTYPE the fence key holds no fence') end
      if number > fence then fence = number end
    end
  end
  if #free > 0 then
    local proposal = tonumber(ARGV[2])
    if proposal > fence then fence = proposal else fence = fence + 1 end
    if fence > 9007199254740000 then return {2} end
  end
  -- All fences, not only those of the new locks: otherwise this set and one of its keys alone could be granted
  -- the same number.
  local raised = string.format('%.0f ', fence) .. owner
  for i = count + 1, 2 * count do
    redis.call('SET', KEYS[i], raised, 'PX', ARGV[4])
  end
end
for i = 1, #free do
  redis.call('SET', free[i], owner, 'PX', ARGV[3])
end
return fence
