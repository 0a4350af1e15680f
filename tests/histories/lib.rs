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
//! One operation a line, as Jepsen's histories are: `{"process":6,"type":"invoke","f":"acquire","key":"a","value":null,
//! "time":1500}`. `time` is in nanoseconds; the lines are in the order in which the checker takes them, so what happens at the
//! same time is concurrent. A lock on several keys has operations for each of them.
//!
//! * `acquire` is `ok` with its token as `value`, or `"shared"`; it is `fail` for a caller that was refused, and `info` for
//!   one that went away before its answer.
//! * `release` is always `info`: it may take effect at any later time. So it has a process of its own.
//! * `number` takes the place of both where clocks jump, so that validity proves nothing. Only the order of tokens counts.

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

pub use traces::{allows, not_of_the_model};

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

/// A request for a lock on one key that its caller did not get.
#[derive(Debug, Clone)]
pub struct Miss {
    pub key: String,
    pub asked: Duration,
    pub answered: Duration,
    /// Otherwise its caller went away before.
    pub is_refused: bool,
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
        let actions = actions(part, exclusive).into_iter();
        let actions = actions.map(|(_, _, process, action)| (process, action));
        let history = todc_utils::History::from_actions(actions.collect());
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
pub fn write(name: &str, holds: &[Hold], misses: &[Miss], exclusive: bool) {
    let Some(folder) = std::env::var_os("TOWER_REDLOCK_HISTORIES") else {
        return;
    };
    fs::create_dir_all(&folder).expect("the folder for histories can be made");
    let text = lines(holds, misses, exclusive);
    fs::write(Path::new(&folder).join(name), text).expect("a history can be written");
}

fn lines(holds: &[Hold], misses: &[Miss], exclusive: bool) -> String {
    let mut lines = Vec::new();
    let mut add = |time: Duration, is_response: bool, process: usize, key: &str, what, value| {
        let (kind, f): (&str, &str) = what;
        let nanos = u64::try_from(time.as_nanos()).expect("a test takes less than centuries");
        let op = json!({ "process": process, "type": kind, "f": f, "key": key, "value": value, "time": nanos });
        lines.push(((time, is_response), format!("{op}\n")));
    };
    let all: Vec<&Hold> = holds.iter().collect();
    for (time, is_response, process, action) in actions(&all, exclusive) {
        let hold = &holds[process / 2];
        let (Call(operation) | Response(operation)) = action;
        let token = || hold.token.map_or_else(|| json!("shared"), Value::from);
        let f = match operation {
            Operation::Acquire(_) => "acquire",
            Operation::Number(_) => "number",
            // Its response comes at the end of all time.
            Operation::Release(_) | Operation::Leave(_) => {
                let kind = if is_response { "info" } else { "invoke" };
                add(
                    hold.end(),
                    is_response,
                    process,
                    &hold.key,
                    (kind, "release"),
                    token(),
                );
                continue;
            }
        };
        let (kind, value) = match is_response {
            false => ("invoke", Value::Null),
            true => ("ok", token()),
        };
        add(time, is_response, process, &hold.key, (kind, f), value);
    }
    for (process, miss) in (2 * holds.len()..).zip(misses) {
        let mut acquire = |time, is_response, kind| {
            add(
                time,
                is_response,
                process,
                &miss.key,
                (kind, "acquire"),
                Value::Null,
            );
        };
        acquire(miss.asked, false, "invoke");
        acquire(
            miss.answered,
            true,
            if miss.is_refused { "fail" } else { "info" },
        );
    }
    lines.sort_by_key(|(place, _)| *place);
    lines.into_iter().map(|(_, line)| line).collect()
}

impl Hold {
    /// Returns from when it may have ended. One that was never seen to be valid may have ended at once.
    fn end(&self) -> Duration {
        self.valid_until.unwrap_or(self.asked)
    }
}

/// Returns the calls and responses with their times and whether they are responses, in their order. What happens at the same
/// time is concurrent. The processes of a lock are twice its number, and the next.
fn actions(holds: &[&Hold], exclusive: bool) -> Vec<(Duration, bool, usize, Action<Operation>)> {
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
            add(2 * number, Operation::Number(token), bounds);
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
    actions
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

    /// What the checker says, also of what is written for others.
    fn is_right(holds: &[Hold]) -> bool {
        let is_right = not_linearizable(holds, true).is_empty();
        let misses = [(0, true), (3, false)].map(|(at, is_refused)| Miss {
            key: "k".to_owned(),
            asked: Duration::from_millis(at),
            answered: Duration::from_millis(at + 4),
            is_refused,
        });
        if holds.len() < PART {
            let written = lines(holds, &misses, true);
            assert_eq!(is_linearizable(&written), is_right, "{written}");
        }
        is_right
    }

    /// What the checker says of a written history, without those who got no lock.
    fn is_linearizable(text: &str) -> bool {
        let ops = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let ops: Vec<Value> = ops.collect();
        let answer_to = |op: &Value| {
            let answers = ops.iter().filter(|other| other["type"] != "invoke");
            let mut answers = answers.filter(|other| other["process"] == op["process"]);
            answers.next().expect("each has an answer")
        };
        let is_right = |key: &str| {
            let (mut actions, mut unanswered, mut leaving) = (Vec::new(), Vec::new(), 0);
            for op in ops.iter().filter(|op| op["key"] == key) {
                let answer = answer_to(op);
                let operation = match (op["f"].as_str().unwrap(), answer["value"].as_u64()) {
                    ("acquire", _) if answer["type"] != "ok" => continue,
                    ("acquire", token) => Operation::Acquire(token),
                    (_, Some(token)) => Operation::Release(token),
                    (_, None) => Operation::Leave(leaving),
                };
                let process = op["process"].as_u64().unwrap().try_into().unwrap();
                match op["type"].as_str().unwrap() {
                    "invoke" => actions.push((process, Call(operation))),
                    "ok" => actions.push((process, Response(operation))),
                    _ => {
                        leaving += u32::from(matches!(operation, Operation::Leave(_)));
                        unanswered.push((process, Response(operation)));
                    }
                }
            }
            actions.append(&mut unanswered);
            WGLChecker::<Register>::is_linearizable(todc_utils::History::from_actions(actions))
        };
        ops.iter().all(|op| is_right(op["key"].as_str().unwrap()))
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
        assert!(lines(&both, &[], false).contains("number"));
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
