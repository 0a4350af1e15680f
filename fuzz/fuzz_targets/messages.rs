//! Messages to subscribers, and the reaction to them. The first line has the numbers of a waiter.
//!
//! A message names the lock of its channel. A payload that is no number of subscribers counts as one subscriber, and no
//! number makes a waiter panic or try later than all subscribers together need.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_redlock::deadpool_redis::redis::{Value, parse_redis_value};
use tower_redlock::fuzzing::read_release;
use tower_redlock::protocol::retry::{OnRelease, on_release};
use tower_redlock_fuzz::first_line;

fuzz_target!(|data: &[u8]| {
    let (line, reply) = first_line(data);
    let Ok(value) = parse_redis_value(reply) else {
        return;
    };
    let Some((lock, subscribers)) = read_release(&value) else {
        return;
    };
    if let Value::Array(parts) = &value
        && let [_, Value::BulkString(channel), Value::BulkString(payload)] = parts.as_slice()
    {
        assert_eq!(lock, *channel);
        let number = std::str::from_utf8(payload).ok();
        let number = number.and_then(|number| number.parse().ok());
        assert_eq!(subscribers, number.unwrap_or(1));
    }
    let mut numbers = line.chunks(8).map(|chunk| {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(bytes)
    });
    let mut number = || numbers.next().unwrap_or_default();
    let (notifications, round_trip, random) = (number(), number(), number());
    let notifications = u32::try_from(notifications % (1 << 32)).expect("it is smaller");
    let round_trip = Duration::from_micros(round_trip % 10_000_000);
    let reaction = on_release(subscribers, notifications, round_trip, random);
    if let OnRelease::Try(delay) = reaction {
        assert!(delay <= round_trip * 4, "{delay:?} of {round_trip:?}");
        assert!(subscribers > 1 || delay.is_zero());
    }
});
