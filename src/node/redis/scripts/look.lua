-- Reads a record.
-- KEYS: record.
-- Returns {4, record, pttl}, only the head of a big record, or {0} if there is none.
return find_record(KEYS[1]) or {0}
