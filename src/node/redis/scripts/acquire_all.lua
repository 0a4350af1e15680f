-- Locks several keys, all or none, and raises all their fences to one number. One script, because a partly
-- acquired set would block other clients without being granted.
-- KEYS: the locks, then, with fencing, their fences in the same order, then, with the restart guard, the
-- generation.
-- ARGV: owner, proposal ('' without fencing), ttl ms, fence retention ms, number of locks, and with the restart
-- guard the generation read.
-- Returns the fence if granted, {0, longest pttl} if another owner holds any of them, {0, longest pttl, 1} if readers
-- do, {2} if a fence is at its maximum, {3} if this server has lost its memory since its generation was read.
if ARGV[6] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[6] then return {3} end
local owner, count = ARGV[1], tonumber(ARGV[5])
local held, shared, free = nil, nil, {}
for i = 1, count do
  local holder = redis.call('GET', KEYS[i])
  if not holder then
    free[#free + 1] = KEYS[i]
  elseif holder ~= owner then
    local pttl = redis.call('PTTL', KEYS[i])
    -- A lock without expiry lasts longest.
    if pttl < 0 or held == -1 then held = -1 else held = math.max(held or 0, pttl) end
    if holder == 'shared' then shared = 1 end
  end
end
if held then return {0, held, shared} end
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
