//! The storage behind the bank: one account, whose every write is compared with what its writer had read.

use std::sync::Mutex;

use serde_json::{Value, json};
use tower_redlock::FencingToken;

use crate::CALLERS;
use crate::events::{Feed, lock};

/// A database with one account. It knows nothing of locks, only of the tokens that come with its calls.
#[derive(Debug)]
pub(crate) struct Storage {
    feed: Feed,
    account: Mutex<Account>,
}

#[derive(Debug)]
struct Account {
    balance: u64,
    /// The highest token that it has seen.
    fence: Option<FencingToken>,
    /// The number of deposits so far.
    version: u64,
    /// What was paid in. Payments have a column of their own, because no lock orders them with deposits.
    paid: u64,
    /// The sum of all accepted writes.
    accepted: u64,
    lost_updates: u64,
    refused_writes: u64,
}

/// What a caller has read, and computes its write from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Read {
    pub(crate) balance: u64,
    version: u64,
}

/// A write, or a read that precedes one, came with a lower token than the storage has seen.
#[derive(Debug)]
pub(crate) struct StaleToken;

impl Storage {
    pub(crate) fn new(feed: Feed) -> Self {
        Self {
            feed,
            account: Mutex::new(Account {
                balance: OPENING_BALANCE,
                fence: None,
                version: 0,
                paid: 0,
                accepted: 0,
                lost_updates: 0,
                refused_writes: 0,
            }),
        }
    }

    /// Reads the account. A token raises the fence here already, so that earlier holders cannot write any more.
    pub(crate) fn read(&self, token: Option<FencingToken>) -> Result<Read, StaleToken> {
        let mut account = lock(&self.account);
        account.raise(token)?;
        Ok(Read {
            balance: account.balance,
            version: account.version,
        })
    }

    /// Writes the balance that follows from a read.
    pub(crate) fn deposit(
        &self,
        caller: usize,
        read: Read,
        amount: u64,
        token: Option<FencingToken>,
    ) -> Result<u64, StaleToken> {
        let mut account = lock(&self.account);
        let accepted = account.raise(token);
        let mut is_lost_update = false;
        if accepted.is_ok() {
            is_lost_update = account.version != read.version;
            account.version += 1;
            account.balance = read.balance + amount;
            account.accepted += amount;
            account.lost_updates += u64::from(is_lost_update);
        } else {
            account.refused_writes += 1;
        }
        self.show(
            caller,
            amount,
            token,
            &account,
            accepted.is_ok(),
            is_lost_update,
        );
        accepted.map(|()| account.total())
    }

    /// Adds a payment in one step, without a lock.
    pub(crate) fn pay(&self, caller: usize, amount: u64) -> u64 {
        let mut account = lock(&self.account);
        account.paid += amount;
        account.accepted += amount;
        self.show(caller, amount, None, &account, true, false);
        account.total()
    }

    pub(crate) fn lost_updates(&self) -> u64 {
        lock(&self.account).lost_updates
    }

    pub(crate) fn refused_writes(&self) -> u64 {
        lock(&self.account).refused_writes
    }

    pub(crate) fn balance(&self) -> u64 {
        lock(&self.account).total()
    }

    /// Shows the balance, and what it would be if no update had been lost.
    pub(crate) fn view(&self) -> Value {
        let account = lock(&self.account);
        json!({
            "balance": account.total(),
            "expected": OPENING_BALANCE + account.accepted,
            "fence": account.fence.map(|fence| fence.to_string()),
        })
    }

    fn show(
        &self,
        caller: usize,
        amount: u64,
        token: Option<FencingToken>,
        account: &Account,
        accepted: bool,
        lost_update: bool,
    ) {
        let write = json!({
            "caller": CALLERS[caller],
            "token": token.map(|token| token.to_string()),
            "amount": amount,
            "balance": account.total(),
            "accepted": accepted,
            "lost_update": lost_update,
        });
        self.feed.send_and_keep("write", write);
    }
}

impl Account {
    fn total(&self) -> u64 {
        self.balance + self.paid
    }

    fn raise(&mut self, token: Option<FencingToken>) -> Result<(), StaleToken> {
        match token {
            Some(token) if self.fence.is_some_and(|fence| token < fence) => Err(StaleToken),
            Some(token) => {
                self.fence = Some(token);
                Ok(())
            }
            // With fencing off, the storage has nothing to compare.
            None => Ok(()),
        }
    }
}

const OPENING_BALANCE: u64 = 100;
