//! A synchronous program: threads that block take turns, and their locks live in a runtime on a thread of its own.
//!
//! Run with
//!
//! ```not_rust
//! cargo run -q --example synchronous_service -- alice=5 bob=1 alice=7
//! alice 12
//! bob 1
//! ```
//!
//! After `--` come deposits. Each is made by a thread of its own, which reads the balance, thinks, and writes the new
//! balance: without the lock, one of two deposits to an account would be lost.
//!
//! The nodes are the Redis servers in `REDLOCK_URLS` (comma-separated), or embedded ones, which exclude no other process.

#![allow(clippy::print_stdout, reason = "a program for people to look at")]
#![expect(clippy::disallowed_methods, reason = "its threads may block")]

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::future::IntoFuture;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tower_redlock::{Redlock, RedlockBuilder, RedlockConfig};

type Failure = Box<dyn Error + Send + Sync>;

#[derive(Default)]
struct Bank(Mutex<BTreeMap<String, u64>>);

fn main() -> Result<(), Failure> {
    // Its thread renews the locks, whatever the threads of the program do. Dropped last: with it, the locks end.
    let background = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let config = RedlockConfig::from_env()?;
    let has_servers = !config.urls().is_empty();
    let builder = match has_servers {
        true => RedlockBuilder::from(config),
        false => Redlock::builder().embedded(3),
    };
    let redlock = builder.runtime(background.handle().clone()).build()?;

    let deposits = env::args().skip(1).map(|deposit| {
        let (account, amount) = deposit.split_once('=').ok_or("usage: ACCOUNT=AMOUNT ...")?;
        Ok((account.to_owned(), amount.parse()?))
    });
    let deposits = deposits.collect::<Result<Vec<(String, u64)>, Failure>>()?;
    let bank = Bank::default();
    thread::scope(|scope| {
        let threads = deposits.iter().map(|(account, amount)| {
            scope.spawn(|| bank.deposit(&background, &redlock, account, *amount))
        });
        let threads: Vec<_> = threads.collect();
        let mut ended = threads.into_iter().map(|thread| thread.join());
        ended.try_for_each(|ended| ended.map_err(|_| "a thread panicked")?)
    })?;
    for (account, balance) in &*bank.balances() {
        println!("{account} {balance}");
    }
    background.block_on(redlock.drain(Duration::from_secs(1)));
    Ok(())
}

impl Bank {
    fn deposit(
        &self,
        background: &Runtime,
        redlock: &Redlock,
        account: &str,
        amount: u64,
    ) -> Result<(), Failure> {
        let lock = redlock.lock(("account", account));
        let guard = background.block_on(lock.into_future())?;
        let before = self.balances().get(account).copied().unwrap_or_default();
        thread::sleep(Duration::from_millis(20));
        // The thread may have been paused for longer than the lock lives.
        if !guard.is_valid() {
            return Err("the lock was lost".into());
        }
        self.balances().insert(account.to_owned(), before + amount);
        background.block_on(guard.release())?;
        Ok(())
    }

    fn balances(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
