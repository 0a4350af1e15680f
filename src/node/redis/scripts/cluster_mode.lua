-- The beginning of all scripts on a server in cluster mode, which are appended to this one. Such a server refuses a call,
-- and a command, with keys of several hash slots. A script may still use such keys one by one, if they are not declared and
-- the script does not begin with `#!`.
-- ARGV: the number of keys, the keys, and what the script has as arguments elsewhere.
local server, count = redis, tonumber(ARGV[1])
local KEYS, ARGV = {unpack(ARGV, 2, count + 1)}, {unpack(ARGV, count + 2)}
local redis = {pcall = server.pcall, error_reply = server.error_reply, sha1hex = server.sha1hex}
-- The scripts name several keys in these two commands only, and read no answer of the second.
function redis.call(command, ...)
  if command ~= 'MGET' and command ~= 'DEL' then return server.call(command, ...) end
  local answers = {}
  for i, key in ipairs({...}) do
    local answer = server.call(command, key)
    answers[i] = command == 'MGET' and answer[1]
  end
  return answers
end
