//! Fenced writes on PostgreSQL: it refuses the writes of a holder whose lock was granted to another since.
//!
//! Run with
//!
//! ```not_rust
//! cargo test --manifest-path tests/postgres/Cargo.toml
//! ```

use tokio_postgres::{Client, Error};
use tower_redlock::FencingToken;

#[cfg(test)]
#[path = "../support/not_run.rs"]
mod not_run;
#[cfg(test)]
mod server;

/// Changes no row if a newer holder of the lock has written or raised the fence.
const ADD: &str =
    "UPDATE account SET balance = balance + $1, fence = $2 WHERE id = $3 AND fence <= $2";

/// Changes no row if a newer holder has written or raised the fence. Keeps the row locked until the transaction ends,
/// and returns the balance, which nothing else changes until then.
const RAISE: &str = "UPDATE account SET fence = $1 WHERE id = $2 AND fence <= $1 RETURNING balance";

const SET: &str = "UPDATE account SET balance = $1 WHERE id = $2";

/// Adds to a balance in one statement. Returns whether the database accepted the token.
pub async fn deposit(
    database: &Client,
    account: &str,
    amount: i64,
    token: FencingToken,
) -> Result<bool, Error> {
    let changed = database
        .execute(ADD, &[&amount, &i64::from(token), &account])
        .await?;
    Ok(changed == 1)
}

/// Reads, decides and writes in one transaction. Returns the new balance, or `None` for a late token.
pub async fn add_interest(
    database: &mut Client,
    account: &str,
    token: FencingToken,
) -> Result<Option<i64>, Error> {
    let transaction = database.transaction().await?;
    let raised = transaction
        .query_opt(RAISE, &[&i64::from(token), &account])
        .await?;
    let Some(row) = raised else {
        return Ok(None); // dropping the transaction rolls it back
    };
    let before: i64 = row.get(0);
    let after = before + before / 10;
    transaction.execute(SET, &[&after, &account]).await?;
    transaction.commit().await?;
    Ok(Some(after))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tower_redlock::Redlock;

    use super::*;
    use crate::server::Server;

    const SCHEMA: &str = "
        CREATE TABLE account (id TEXT PRIMARY KEY, balance BIGINT NOT NULL, fence BIGINT NOT NULL);
        INSERT INTO account VALUES ('alice', 100, 0)";

    /// Returns the tokens of two locks on one key, the earlier one first.
    async fn two_tokens() -> [FencingToken; 2] {
        let redlock = Redlock::in_memory(3);
        let mut tokens = Vec::new();
        for _ in 0..2 {
            let guard = redlock.lock(("account", "alice")).await.unwrap();
            tokens.extend(guard.fencing_token());
            guard.release().await.unwrap();
        }
        tokens.try_into().unwrap()
    }

    async fn balance(database: &Client) -> i64 {
        let read = "SELECT balance FROM account WHERE id = 'alice'";
        database.query_one(read, &[]).await.unwrap().get(0)
    }

    #[tokio::test]
    async fn late_holder_writes_nothing_and_the_newer_one_writes_often() {
        let Some(server) = Server::start() else {
            return;
        };
        let mut database = server.connect().await;
        database.batch_execute(SCHEMA).await.unwrap();
        let [late, newer] = two_tokens().await;
        // In order: the newer one has not written yet.
        assert!(deposit(&database, "alice", 10, late).await.unwrap());
        for _ in 0..2 {
            assert!(deposit(&database, "alice", 5, newer).await.unwrap());
        }
        assert!(!deposit(&database, "alice", 7, late).await.unwrap());
        let refused = add_interest(&mut database, "alice", late).await.unwrap();
        assert_eq!(refused, None);
        assert_eq!(balance(&database).await, 120);
        let accepted = add_interest(&mut database, "alice", newer).await.unwrap();
        assert_eq!(accepted, Some(132));
    }

    /// The newer holder has read, and has not written yet: the late write would be lost, so it must not be accepted.
    #[tokio::test]
    async fn late_write_waits_for_the_transaction_that_raised_the_fence_and_is_refused() {
        let Some(server) = Server::start() else {
            return;
        };
        let (mut newer_one, late_one) = (server.connect().await, server.connect().await);
        newer_one.batch_execute(SCHEMA).await.unwrap();
        let [late, newer] = two_tokens().await;
        let transaction = newer_one.transaction().await.unwrap();
        let raise: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&i64::from(newer), &"alice"];
        let before: i64 = transaction.query_one(RAISE, &raise).await.unwrap().get(0);
        let writing = deposit(&late_one, "alice", 7, late);
        let mut writing = Box::pin(writing);
        // It does not return before the transaction ends. Too short a time cannot fail the test.
        let waited = tokio::time::timeout(Duration::from_millis(200), &mut writing).await;
        assert!(waited.is_err(), "{waited:?}");
        let after = before + 5;
        let set: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&after, &"alice"];
        transaction.execute(SET, &set).await.unwrap();
        transaction.commit().await.unwrap();
        assert!(!writing.await.unwrap());
        assert_eq!(balance(&late_one).await, 105);
    }
}
