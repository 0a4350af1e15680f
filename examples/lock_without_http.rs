//! A lock without HTTP: hold it during some work, and stop the work when the lock is lost.
//!
//! Run with
//!
//! ```not_rust
//! cargo run -q --example lock_without_http -- report
//! acquired report token=1763659999000000
//! released report
//! ```
//!
//! After `--` come KEY, HOLD_MS and WAIT_MS. It prints `acquired KEY token=N`, holds the lock for
//! HOLD_MS (default 1000) and prints `released KEY`. If another client holds the lock for longer than
//! WAIT_MS (default 0), it prints `contended KEY` and exits with status 1; without a majority of the
//! nodes, `unavailable` and 2; if the lock is lost while held, `lost KEY` and 3.
//!
//! The nodes are the Redis servers in `REDLOCK_URLS` (comma-separated), or embedded ones, which
//! exclude no other process. Further variables set the rest, such as `REDLOCK_NAMESPACE`, or
//! `REDLOCK_RESTART_GUARD=off`, which turns the restart guard off; `RedlockConfig` has the list.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]

use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use tower_redlock::{BuildError, LockError, Redlock, RedlockBuilder, RedlockConfig};

/// How long to wait for slow nodes at the end.
const GRACE: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let key = args
        .next()
        .ok_or("usage: lock_without_http KEY [HOLD_MS] [WAIT_MS]")?;
    let mut millis = |default| {
        let arg = args.next().map(|arg| arg.parse()).transpose();
        arg.map(|given| Duration::from_millis(given.unwrap_or(default)))
    };
    let (hold, wait) = (millis(1_000)?, millis(0)?);

    let redlock = redlock()?;
    let status = hold_lock(&redlock, &key, hold, wait).await;
    // A majority has confirmed the release; wait for the slowest node, too.
    redlock.drain(GRACE).await;
    status
}

async fn hold_lock(
    redlock: &Redlock,
    key: &str,
    hold: Duration,
    wait: Duration,
) -> Result<ExitCode, Box<dyn Error>> {
    let guard = match redlock.lock(key).wait(wait).await {
        Ok(guard) => guard,
        Err(LockError::Contended { .. }) => {
            println!("contended {key}");
            return Ok(ExitCode::from(1));
        }
        Err(error @ LockError::Unavailable { .. }) => {
            println!("unavailable");
            eprintln!("{error}");
            return Ok(ExitCode::from(2));
        }
        Err(error) => return Err(error.into()),
    };
    match guard.fencing_token() {
        Some(token) => println!("acquired {key} token={token}"),
        None => println!("acquired {key}"),
    }

    tokio::select! {
        () = work(hold) => {}
        // This drops the work at its next await: it must not continue without the lock.
        _ = guard.lost() => {
            println!("lost {key}");
            // A minority of the nodes may still hold the lock; release it there.
            drop(guard.release().await);
            return Ok(ExitCode::from(3));
        }
    }
    guard.release().await?;
    println!("released {key}");
    Ok(ExitCode::SUCCESS)
}

async fn work(takes: Duration) {
    tokio::time::sleep(takes).await;
}

fn redlock() -> Result<Redlock, BuildError> {
    let config = RedlockConfig::from_env()?;
    if config.urls().is_empty() {
        return Ok(Redlock::in_memory(3));
    }
    RedlockBuilder::from(config).build()
}
