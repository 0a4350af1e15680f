-- The beginning of a script for a key that must have no record, which is appended to this one. Its third key is that of
-- the record. Returns what that script does, or {4, record, pttl} if there is a record, only its head if it is big.
if ARGV[5] and redis.call('GET', KEYS[#KEYS]) ~= ARGV[5] then return {3} end
local found = find_record(KEYS[3])
if found then return found end
-- The generation is compared.
ARGV[5] = nil
