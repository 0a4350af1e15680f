//! Histories of locks, for a checker of linearizability that is not ours, and as JSON for others; and the lives of leases, for
//! the rules of the model.
//!
//! # The object
//!
//! A lock on one key is a register with the last token and the present holders. `acquire` compares and sets: it needs a
//! register without holders (a reader: without a writer) and a token above the last one. `release` takes the holder away.
//!
//! A lock becomes effective between its request and its grant. It may end at any time after the last instant at which its
//! holder saw that it was valid, because nothing is promised later: so its `release` begins then, and is never answered.
//! A history is linearizable if every operation can be given one instant within its bounds so that all follow the rules. The
//! history of each key is judged alone, because linearizability is local (Herlihy and Wing, 1990).
//!
//! # The format
//!
//! One operation a line, as Jepsen's histories are: `{"process":3,"type":"invoke","f":"acquire","key":"a","value":null,
//! "time":1500}`. `time` is in nanoseconds. The type `ok` of an `acquire` has the token as its `value`, or `"shared"`;
//! `info` of a `release` says that it may take effect at any later time, so each lock has a process of its own. A lock on
//! several keys has one for each. Requests that were refused are left out: a refusal says nothing of the register.

#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "only tests use it"
)]

mod traces;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use todc_utils::Action::{Call, Response};
use todc_utils::{Action, Specification, WGLChecker};

pub use traces::not_of_the_model;

/// A lock on one key, as its holder saw it. Times are since the beginning of the history.
#[derive(Debug, Clone)]
pub struct Hold {
    pub key: String,
    /// `None` for a reader.
    pub token: Option<u64>,
    pub asked: Duration,
    pub granted: Duration,
    /// The last instant at which it was known to be valid; `None` if that was never seen.
    pub valid_until: Option<Duration>,
}

/// Returns the keys whose history is not linearizable. Without `exclusive`, only the order of the tokens counts.
pub fn not_linearizable(holds: &[Hold], exclusive: bool) -> Vec<&str> {
    let mut by_key: BTreeMap<&str, Vec<&Hold>> = BTreeMap::new();
    for hold in holds
        .iter()
        .filter(|hold| exclusive || hold.token.is_some())
    {
        by_key.entry(&hold.key).or_default().push(hold);
    }
    let is_wrong = |part: &[&Hold]| {
        let history = todc_utils::History::from_actions(actions(part, exclusive));
        !WGLChecker::<Register>::is_linearizable(history)
    };
    let mut wrong = Vec::new();
    for (key, mut holds) in by_key {
        holds.sort_by_key(|hold| hold.asked);
        let mut starts = (0..holds.len()).step_by(PART / 2);
        if starts.any(|start| is_wrong(&holds[start..holds.len().min(start + PART)])) {
            wrong.push(key);
        }
    }
    wrong
}

/// How many locks the checker judges together, because it takes time and memory with the square of their number. Some locks
/// of a linearizable history are one, too: without the others, fewer are held, and the tokens rise all the same. The parts
/// overlap by half.
const PART: usize = 400;

/// Writes a history into the folder that `TOWER_REDLOCK_HISTORIES` names, if it names one.
pub fn write(name: &str, holds: &[Hold]) {
    let Some(folder) = std::env::var_os("TOWER_REDLOCK_HISTORIES") else {
        return;
    };
    let mut lines: Vec<(Duration, Value)> = Vec::new();
    for (process, hold) in holds.iter().enumerate() {
        let mut line = |kind, f, value, time: Duration| {
            let nanos = u64::try_from(time.as_nanos()).expect("a test takes less than centuries");
            let key = &hold.key;
            let op = json!({ "process": process, "type": kind, "f": f, "key": key, "value": value, "time": nanos });
            lines.push((time, op));
        };
        let token = hold.token.map_or_else(|| json!("shared"), Value::from);
        line("invoke", "acquire", Value::Null, hold.asked);
        line("ok", "acquire", token.clone(), hold.granted);
        let end = hold.end().max(hold.granted);
        line("invoke", "release", token.clone(), end);
        line("info", "release", token, end);
    }
    lines.sort_by_key(|(time, _)| *time);
    let text: String = lines.iter().map(|(_, op)| format!("{op}\n")).collect();
    fs::create_dir_all(&folder).expect("the folder for histories can be made");
    fs::write(Path::new(&folder).join(name), text).expect("a history can be written");
}

impl Hold {
    /// Returns from when it may have ended. One that was never seen to be valid may have ended at once.
    fn end(&self) -> Duration {
        self.valid_until.unwrap_or(self.asked)
    }
}

/// Returns the calls and responses, in the order of their times. What happens at the same time is concurrent.
fn actions(holds: &[&Hold], exclusive: bool) -> Vec<(usize, Action<Operation>)> {
    let mut actions = Vec::new();
    let mut readers: Vec<usize> = (0..holds.len())
        .filter(|number| holds[*number].token.is_none())
        .collect();
    readers.sort_by_key(|number| holds[*number].end());
    let mut ranks = vec![0; holds.len()];
    for (rank, number) in (0..).zip(readers) {
        ranks[number] = rank;
    }
    for (number, hold) in holds.iter().enumerate() {
        // The checker knows a process as something that has one operation at a time.
        let mut add = |process, operation, [call, response]: [Duration; 2]| {
            actions.push((call, false, process, Call(operation)));
            actions.push((response, true, process, Response(operation)));
        };
        let bounds = [hold.asked, hold.granted];
        if let (Some(token), false) = (hold.token, exclusive) {
            add(number, Operation::Number(token), bounds);
            continue;
        }
        add(2 * number, Operation::Acquire(hold.token), bounds);
        let end = [hold.end(), Duration::MAX];
        let release = match hold.token {
            Some(token) => Operation::Release(token),
            None => Operation::Leave(ranks[number]),
        };
        add(2 * number + 1, release, end);
    }
    actions.sort_by_key(|(time, is_response, ..)| (*time, *is_response));
    let actions = actions.into_iter();
    actions
        .map(|(_, _, process, action)| (process, action))
        .collect()
}

/// What is done to the register. Readers have no token.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Acquire(Option<u64>),
    Release(u64),
    /// The release of the reader that is next in the order of their ends. Any order of these can be changed into this one,
    /// because the register only counts readers and no release has to be over; others would take the checker time with
    /// their number as a power.
    Leave(u32),
    /// An acquisition of which only the token counts.
    Number(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    last: u64,
    writer: Option<u64>,
    readers: u32,
    /// How many readers have left.
    left: u32,
}

struct Register;

impl Specification for Register {
    type State = State;
    type Operation = Operation;

    fn init() -> State {
        State {
            last: 0,
            writer: None,
            readers: 0,
            left: 0,
        }
    }

    fn apply(operation: &Operation, state: &State) -> (bool, State) {
        let mut next = *state;
        let is_allowed = match *operation {
            Operation::Acquire(Some(token)) => {
                (next.last, next.writer) = (token, Some(token));
                state.writer.is_none() && state.readers == 0 && token > state.last
            }
            Operation::Acquire(None) => {
                next.readers += 1;
                state.writer.is_none()
            }
            Operation::Release(token) => {
                next.writer = None;
                state.writer == Some(token)
            }
            Operation::Leave(rank) => {
                next.readers = state.readers.saturating_sub(1);
                next.left += 1;
                state.readers > 0 && state.left == rank
            }
            Operation::Number(token) => {
                next.last = token;
                token > state.last
            }
        };
        (is_allowed, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(token: u64, [asked, granted, valid_until]: [u64; 3]) -> Hold {
        let at = Duration::from_millis;
        Hold {
            key: "k".to_owned(),
            token: (token > 0).then_some(token),
            asked: at(asked),
            granted: at(granted),
            valid_until: (valid_until > 0).then(|| at(valid_until)),
        }
    }

    fn is_right(holds: &[Hold]) -> bool {
        not_linearizable(holds, true).is_empty()
    }

    #[test]
    fn good_histories_are_accepted() {
        for holds in [
            // One after the other, and asked for while the first is held.
            vec![
                hold(1, [0, 10, 20]),
                hold(2, [15, 30, 40]),
                hold(3, [50, 60, 70]),
            ],
            // Both asked at once: the order of the tokens is free.
            vec![hold(2, [0, 30, 40]), hold(1, [0, 10, 20])],
            // At the instant at which the first was last valid.
            vec![hold(1, [0, 10, 20]), hold(2, [0, 20, 40])],
            // Granted too late to be valid.
            vec![hold(1, [0, 60, 0]), hold(2, [10, 20, 50])],
            // Readers together, between two writers.
            vec![
                hold(1, [0, 1, 5]),
                hold(0, [2, 10, 30]),
                hold(0, [8, 12, 20]),
                hold(2, [15, 31, 40]),
            ],
        ] {
            assert!(is_right(&holds), "{holds:#?}");
        }
    }

    #[test]
    fn planted_violations_are_found() {
        for holds in [
            // Two are valid at once.
            vec![hold(1, [0, 10, 20]), hold(2, [0, 19, 40])],
            // A token twice, and one that falls.
            vec![hold(1, [0, 10, 20]), hold(1, [15, 30, 40])],
            vec![hold(2, [0, 10, 20]), hold(1, [11, 30, 40])],
            // It fell although both were asked for at once: the first was held before the second.
            vec![hold(2, [0, 10, 20]), hold(1, [0, 30, 40])],
            // A writer beside a reader.
            vec![hold(0, [0, 10, 30]), hold(1, [5, 20, 40])],
            vec![hold(1, [0, 10, 30]), hold(0, [5, 20, 40])],
        ] {
            assert!(!is_right(&holds), "{holds:#?}");
        }
        let falls = [hold(2, [0, 10, 0]), hold(1, [11, 30, 0])];
        assert_eq!(not_linearizable(&falls, false), ["k"]);
        let both = [hold(1, [0, 10, 20]), hold(2, [0, 19, 40])];
        assert!(
            not_linearizable(&both, false).is_empty(),
            "only tokens count"
        );
        let other = Hold {
            key: "other".to_owned(),
            ..hold(1, [0, 10, 20])
        };
        assert!(is_right(&[hold(1, [0, 10, 20]), other]));

        // In the last of several parts.
        let mut many: Vec<_> = (1..1_000)
            .map(|at| hold(at, [10 * at, 10 * at + 1, 10 * at + 5]))
            .collect();
        assert!(is_right(&many));
        many.push(hold(1_000, [9_990, 9_994, 9_999]));
        assert!(!is_right(&many));
    }
}
