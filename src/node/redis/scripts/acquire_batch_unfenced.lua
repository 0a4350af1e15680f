-- Locks several keys without fences, each for its own owner, if this server has not lost its memory. One call, so that
-- the generation is compared once.
-- KEYS: the lock of each key, then the generation.
-- ARGV: ttl ms, the generation read, then the owner for each key.
-- Returns 1 if all locks are granted; {3} if this server has lost its memory since its generation was read; else
-- what acquire_all.lua returns for each key, which may be an error.
if redis.call('GET', KEYS[#KEYS]) ~= ARGV[2] then return {3} end
local answers, all_granted = {}, true
for i = 1, #ARGV - 2 do
  local owner = ARGV[i + 2]
  -- By pcall: an error of one key must not hide what became of the others.
  local answer = redis.pcall('SET', KEYS[i], owner, 'PX', ARGV[1], 'NX')
  if answer and answer.ok then
    answer = 0
  else
    -- A server that is out of memory refuses the SET also of a key that is held.
    local holder = redis.pcall('GET', KEYS[i])
    if holder == owner then
      answer = 0
    elseif type(holder) == 'string' then
      answer = redis.pcall('PTTL', KEYS[i])
      if type(answer) == 'number' then
        answer = {0, answer, holder == 'shared' and 1 or string.sub(holder, 33)}
      end
    elseif holder then
      answer = holder
    end
  end
  answers[i] = answer
  all_granted = all_granted and answer == 0
end
return all_granted and 1 or answers
