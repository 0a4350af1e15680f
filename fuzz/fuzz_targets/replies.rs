//! Replies of servers, in pieces. The first line has the sizes of the pieces.
//!
//! However the bytes are cut into pieces, the replies and the error behind them are the same, and each reply is the
//! one that redis-rs reads. The memory that is used depends on the bytes that have arrived, never on the lengths
//! that they announce.

#![no_main]

use std::task::{Context, Poll, Waker};

use libfuzzer_sys::fuzz_target;
use tower_redlock::deadpool_redis::redis::{Parser, Value};
use tower_redlock::fuzzing::ReplyStream;
use tower_redlock_fuzz::{Pieces, expanded, first_line, growth};

fuzz_target!(|data: &[u8]| {
    let (line, stream) = first_line(data);
    let mut stream = expanded(stream);
    stream.truncate(256 << 10);
    // A long line is searched for its end after each piece.
    let unit = if stream.len() < 4096 { 1 } else { 509 };
    let sizes = line.iter().map(|byte| unit * usize::from(*byte).max(1));
    let sizes: Vec<usize> = sizes.collect();

    let ((whole, error), grown) = growth(|| read(&stream, &[]));
    assert!(
        grown <= 128 * stream.len() + (256 << 10),
        "{} bytes took {grown} bytes",
        stream.len()
    );
    let in_pieces = read(&stream, &sizes);
    assert_eq!(in_pieces, (whole.clone(), error.clone()), "{sizes:?}");
    if stream.len() < 4096 {
        assert_eq!(read(&stream, &[1]), (whole.clone(), error));
    }

    let (mut parser, mut rest) = (Parser::new(), stream.as_slice());
    for reply in whole {
        assert_eq!(parser.parse_value(&mut rest).ok(), Some(reply));
    }
});

/// Reads replies until the stream ends or is refused.
fn read(stream: &[u8], sizes: &[usize]) -> (Vec<Value>, String) {
    let mut replies = ReplyStream::new(Pieces::new(stream, sizes));
    let mut context = Context::from_waker(Waker::noop());
    let mut all = Vec::new();
    loop {
        match replies.poll_reply(&mut context) {
            Poll::Ready(Ok(reply)) => all.push(reply),
            Poll::Ready(Err(why)) => return (all, why.to_string()),
            Poll::Pending => unreachable!("the stream is always ready"),
        }
    }
}
