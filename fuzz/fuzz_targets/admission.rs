//! The introduction of two servers: the replies to `INFO` and to the admission script. Fields are separated by NUL.
//!
//! No introduction panics. A server that may vote at once has said that it is a master, with a run id, whose memory
//! and process are older than the quarantine. Two nodes that are one process are noticed.

#![no_main]

use std::sync::Arc;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_redlock::fuzzing::{AdmissionGuard, ReplyStream};
use tower_redlock_fuzz::{Pieces, run};

const WINDOW: Duration = Duration::from_secs(20);
const ATTEMPT: Duration = Duration::from_secs(1);

fuzz_target!(|data: &[u8]| {
    let mut fields = data.split(|byte| *byte == 0);
    let mut field = || fields.next().unwrap_or_default();
    let servers = [(); 2].map(|()| [(); 4].map(|()| field()));
    let key = || Arc::from(&b"redlock:generation"[..]);
    let guard = AdmissionGuard::new(WINDOW, Some(key()));
    let names: [Arc<str>; 2] = ["a".into(), "b".into()];
    let mut run_ids = Vec::new();
    for (name, [info, generation, seconds, micros]) in names.iter().zip(servers) {
        let mut replies = bulk(info);
        replies.extend(b"*3\r\n");
        replies.extend([generation, seconds, micros].into_iter().flat_map(bulk));
        let mut stream = ReplyStream::new(Pieces::new(&replies, &[]));
        let admitted = run(guard.admit(name, &mut stream, ATTEMPT));
        let Ok((_, left)) = admitted else {
            continue;
        };
        let info = String::from_utf8_lossy(info);
        assert_eq!(first(&info, "role"), Some("master"), "{info}");
        let run_id = first(&info, "run_id").expect("a server without a run id is refused");
        if left.is_zero() {
            let uptime = first(&info, "uptime_in_seconds").and_then(|text| text.parse().ok());
            let uptime: u64 = uptime.expect("a server without an uptime is refused");
            assert!(uptime > WINDOW.as_secs(), "{uptime} s");
            let generation = String::from_utf8_lossy(generation).into_owned();
            let began: Vec<&str> = generation.split(':').collect();
            let began = micros_of(began[1].as_bytes(), began[2].as_bytes());
            let age = micros_of(seconds, micros).saturating_sub(began);
            assert!(age >= WINDOW.as_micros(), "{age}");
        }
        run_ids.push(run_id.to_owned());
    }
    if let [one, other] = run_ids.as_slice()
        && one == other
    {
        assert_eq!(guard.duplicate_of("a").as_deref(), Some("b"));
        assert_eq!(guard.duplicate_of("b").as_deref(), Some("a"));
    }

    // Bytes in place of replies, with the guard on and off.
    for key in [Some(key()), None] {
        let guard = AdmissionGuard::new(WINDOW, key);
        let mut stream = ReplyStream::new(Pieces::new(data, &[]));
        drop(run(guard.admit(&names[0], &mut stream, ATTEMPT)));
        let mut info = bulk(servers[0][0]);
        info.extend(data);
        let mut stream = ReplyStream::new(Pieces::new(&info, &[3]));
        drop(run(guard.admit(&names[0], &mut stream, ATTEMPT)));
    }
});

/// Returns the value of the first line with a name.
fn first<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = info.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(found, _)| *found == name).map(|pair| pair.1)
}

fn micros_of(seconds: &[u8], micros: &[u8]) -> u128 {
    let number = |text: &[u8]| -> u128 {
        let text = String::from_utf8_lossy(text);
        text.parse().expect("other texts are refused")
    };
    number(seconds) * 1_000_000 + number(micros)
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    let length = format!("${}\r\n", bytes.len());
    [length.as_bytes(), bytes, b"\r\n"].concat()
}
