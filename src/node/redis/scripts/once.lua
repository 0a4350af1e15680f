-- Reads of the scripts for keys with records. Those scripts are appended to this one.

-- Returns {4, record, pttl} if the key has a record, only its head if it is big; nil without one.
local function find_record(key)
  local pttl = redis.call('PTTL', key)
  -- Not by its length: an empty value is foreign data, which must not be overwritten.
  if pttl == -2 then return nil end
  if redis.call('STRLEN', key) > 16384 then
    return {4, redis.call('GETRANGE', key, 0, 64), pttl}
  end
  return {4, redis.call('GET', key), pttl}
end

-- Returns the number of a fence, 0 if there is none; nil if the key holds something else.
local function parse_fence(value)
  return value and tonumber(string.match(value, '^(%d+) ')) or (not value and 0 or nil)
end
