-- The end of the scripts that grant or confirm several keys, which are appended to this one. Their arguments from the
-- fourth on are an owner and a number for each key.

-- Returns 1 if `answer` returns its number for each key; else what it returns for each.
local function answer_each(answer)
  local answers, as_asked = {}, true
  for i = 1, (#ARGV - 3) / 2 do
    answers[i] = answer(i)
    as_asked = as_asked and answers[i] == tonumber(ARGV[2 * i + 3])
  end
  return as_asked and 1 or answers
end
