//! The tour: eight steps that anyone can repeat by hand.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::instance::{Instance, Weakness};
use crate::playground::Playground;
use crate::{NODES, RESTART_GUARD, TTL};

/// A step of the tour.
#[derive(Debug)]
pub(crate) struct Step {
    title: &'static str,
    text: &'static str,
    weakness: Option<Weakness>,
}

pub(crate) const STEPS: [Step; 8] = [
    Step {
        title: "Contention",
        text: "Five callers of two servers deposit into one account. One holds the lock at a time; the others get 423 at once and try again.",
        weakness: None,
    },
    Step {
        title: "Kill one node",
        text: "Node 1 loses its process and its memory. Nothing happens to the requests: three of the other four nodes are a majority.",
        weakness: None,
    },
    Step {
        title: "Kill a majority",
        text: "Without a majority, whether the lock is held is unknown, so all requests get 503, and none gets 423. The nodes come back empty and are quarantined until no lock that they may have forgotten can be valid.",
        weakness: None,
    },
    Step {
        title: "A pause without fencing",
        text: "Ann reads the balance and is paused for longer than her lock lives, as if by garbage collection. Ben deposits meanwhile, and her late write erases his deposit.",
        weakness: Some(Weakness::NoFencing),
    },
    Step {
        title: "The same pause with fencing",
        text: "Each lock has a fencing token that is higher than all earlier ones. The storage has seen Ben's, so it refuses Ann's late write.",
        weakness: None,
    },
    Step {
        title: "A node forgets",
        text: "A node loses its memory while Ann holds the lock. Without the restart guard it helps to grant the lock to Ben as well; with the guard it is quarantined and does not vote.",
        weakness: Some(Weakness::NoRestartGuard),
    },
    Step {
        title: "Disconnect a client",
        text: "Ann closes her connection in the middle of a request. The lock is released at once, not when its ttl ends.",
        weakness: None,
    },
    Step {
        title: "Retry a payment",
        text: "Ann pays, and her client retries the payment at the other server with the same Idempotency-Key. The payment is executed once; the retry gets the recorded response.",
        weakness: None,
    },
];

type Outcome = Result<(bool, String), Box<dyn Error + Send + Sync>>;

/// Returns the texts of all steps.
pub(crate) fn texts() -> Value {
    let steps = STEPS.iter().enumerate().map(|(index, step)| {
        json!({
            "step": index + 1,
            "title": step.title,
            "text": step.text,
            "weak": step.weakness.map(Weakness::text),
        })
    });
    steps.collect()
}

/// Runs a step to its end; returns whether it showed what it promises, and what was seen.
pub(crate) async fn run(playground: &Playground, step: usize) -> Outcome {
    // A step that fails to end would block the tour for good.
    let steps = async {
        let main = playground.show_main();
        main.settle().await;
        main.heal().await?;
        match step {
            1 => contention(&main).await,
            2 => one_node_down(&main).await,
            3 => majority_down(&main).await,
            4 => pause_without_fencing(&*playground.show_weak(Weakness::NoFencing).await?).await,
            5 => pause_with_fencing(&main).await,
            6 => forgetful_node(playground, &main).await,
            7 => disconnect(&main).await,
            _ => payment(&main).await,
        }
    };
    let outcome = timeout(LONGEST_STEP, steps).await;
    outcome.unwrap_or_else(|_| {
        let text = format!(
            "The step did not end within {LONGEST_STEP:?}; were nodes broken by hand meanwhile?"
        );
        Ok((false, text))
    })
}

async fn contention(bank: &Instance) -> Outcome {
    let before = bank.counters();
    bank.set_callers(5);
    bank.set_load(true);
    sleep(Duration::from_secs(4)).await;
    bank.settle().await;
    let after = bank.counters();
    let acquired = after.acquired - before.acquired;
    let contended = after.contended - before.contended;
    let doubles = after.two_holders - before.two_holders;
    let text = format!(
        "{acquired} locks and {contended} refusals with 423 in four seconds; two valid holders: {doubles}."
    );
    Ok((acquired > 0 && contended > 0 && doubles == 0, text))
}

async fn one_node_down(bank: &Instance) -> Outcome {
    bank.set_load(true);
    bank.cluster.kill(0);
    let before = bank.counters();
    sleep(Duration::from_secs(3)).await;
    bank.settle().await;
    let after = bank.counters();
    let acquired = after.acquired - before.acquired;
    let refused = after.without_quorum() - before.without_quorum();
    bank.cluster.restart(0).await?;
    let text = format!(
        "{acquired} locks without node 1, {refused} refusals with 503. It is back, and quarantined because its memory is gone."
    );
    Ok((acquired > 0 && refused == 0, text))
}

async fn majority_down(bank: &Instance) -> Outcome {
    bank.set_load(true);
    for node in 0..=NODES / 2 {
        bank.cluster.kill(node);
    }
    // Until the locks of before are over.
    sleep(Duration::from_millis(500)).await;
    let before = bank.counters();
    sleep(Duration::from_secs(2)).await;
    let down = bank.counters();
    for node in 0..=NODES / 2 {
        bank.cluster.restart(node).await?;
    }
    bank.wait_for_voters(NODES / 2 + 1).await;
    let back = Instant::now() + 2 * RESTART_GUARD;
    while bank.counters().acquired == down.acquired && Instant::now() < back {
        sleep(SOON).await;
    }
    bank.settle().await;
    let after = bank.counters();
    let refused = down.unavailable - before.unavailable;
    let contended = down.contended - before.contended;
    let acquired = down.acquired - before.acquired;
    let text = format!(
        "While three nodes were down: {refused} refusals with 503, {contended} with 423, and {acquired} locks. \
         After the quarantine, requests are served again."
    );
    let is_as_promised =
        refused > 0 && contended == 0 && acquired == 0 && after.acquired > down.acquired;
    Ok((is_as_promised, text))
}

/// Ann reads, is paused for longer than the ttl, and writes; meanwhile Ben deposits. Returns the statuses of both.
async fn paused_holder(bank: &Instance) -> Result<(u16, u16), Box<dyn Error + Send + Sync>> {
    let (ann, ben) = (bank.caller(ANN), bank.caller(BEN));
    let pause = 2 * TTL;
    let parameters = format!("pause_ms={}", pause.as_millis());
    let late = tokio::spawn(async move { ann.deposit(5, &parameters).await });
    wait_until_held(bank, ANN).await;
    let status = loop {
        if let Some(answer) = ben.deposit(10, "hold_ms=200").await
            && answer.status == 200
        {
            break answer.status;
        }
        sleep(SOON).await;
    };
    let late = late.await?.ok_or("Ann's server is gone")?;
    Ok((late.status, status))
}

async fn pause_without_fencing(bank: &Instance) -> Outcome {
    let before = bank.storage.balance();
    paused_holder(bank).await?;
    let (after, lost) = (bank.storage.balance(), bank.storage.lost_updates());
    let doubles = bank.counters().two_holders;
    let text = format!(
        "Deposits of 5 and 10 turned {before} into {after}. Lost updates: {lost}. Two valid holders: {doubles}."
    );
    Ok((lost > 0 && doubles == 0, text))
}

async fn pause_with_fencing(bank: &Instance) -> Outcome {
    let refused = bank.storage.refused_writes();
    let lost = bank.storage.lost_updates();
    let (late, _) = paused_holder(bank).await?;
    let refused = bank.storage.refused_writes() - refused;
    let lost = bank.storage.lost_updates() - lost;
    let text = format!(
        "Refused writes: {refused}, lost updates: {lost}. Ann's request ended with {late}."
    );
    Ok((refused == 1 && lost == 0, text))
}

async fn forgetful_node(playground: &Playground, main: &Arc<Instance>) -> Outcome {
    let weak = playground.show_weak(Weakness::NoRestartGuard).await?;
    let without = one_node_forgets(&weak).await?;
    // For the reader of the page.
    sleep(Duration::from_secs(2)).await;
    drop(weak);
    playground.show_main();
    let with = one_node_forgets(main).await?;
    let is_quarantined = main.board.is_quarantined(2);
    let state = if is_quarantined {
        "quarantined"
    } else {
        "not quarantined"
    };
    let text = format!(
        "While Ann's lock was valid, Ben got it {without} times without the restart guard, and {with} times with it: \
         node 3 is {state}."
    );
    Ok((without > 0 && with == 0 && is_quarantined, text))
}

/// Ann holds the lock on nodes 1 to 3, of which node 3 forgets it, and Ben asks nodes 3 to 5. Returns how often two
/// callers held the lock.
async fn one_node_forgets(bank: &Instance) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let before = bank.counters().two_holders;
    for node in [3, 4] {
        bank.board.cut(node, 0, true);
    }
    for node in [0, 1] {
        bank.board.cut(node, 1, true);
    }
    // A connection that is cut is noticed a moment later.
    sleep(2 * SOON).await;
    let (ann, ben) = (bank.caller(ANN), bank.caller(BEN));
    let holder = tokio::spawn(async move { ann.deposit(5, "hold_ms=1500").await });
    wait_until_held(bank, ANN).await;
    bank.cluster.wipe(2).await?;
    while bank.is_holding(ANN) {
        ben.deposit(10, "hold_ms=200").await;
        sleep(SOON).await;
    }
    drop(holder.await?);
    let after = bank.counters().two_holders;
    for node in 0..NODES {
        for server in [0, 1] {
            bank.board.cut(node, server, false);
        }
    }
    Ok(after - before)
}

async fn disconnect(bank: &Instance) -> Outcome {
    let (ann, ben) = (bank.caller(ANN), bank.caller(BEN));
    let held = tokio::spawn(async move { ann.deposit(5, "hold_ms=5000").await });
    wait_until_held(bank, ANN).await;
    sleep(Duration::from_millis(700)).await;
    let refused = ben.deposit(10, "hold_ms=100").await;
    bank.disconnect(ANN);
    let disconnected = Instant::now();
    let waited = loop {
        let asked = disconnected.elapsed();
        if let Some(answer) = ben.deposit(10, "hold_ms=100").await
            && answer.status == 200
        {
            break asked;
        }
        if disconnected.elapsed() > 2 * TTL {
            break disconnected.elapsed();
        }
        sleep(SOON / 10).await;
    };
    drop(held.await?);
    let was_locked = refused.is_some_and(|answer| answer.status == 423);
    let text = format!(
        "Ben got 423 while Ann held the lock, and the lock with a request {} ms after she had gone. Its ttl is {} ms.",
        waited.as_millis(),
        TTL.as_millis()
    );
    Ok((was_locked && waited < TTL / 2, text))
}

async fn payment(bank: &Instance) -> Outcome {
    let key = format!("tour-{:08x}", fastrand::u32(..));
    let before = bank.storage.balance();
    let ann = bank.caller(ANN);
    let first = ann.pay(25, &key).await.ok_or("the server is gone")?;
    let elsewhere = ann.at_the_other_server(bank);
    let retry = elsewhere.pay(25, &key).await.ok_or("the server is gone")?;
    let paid = bank.storage.balance() - before;
    let is_same = first.body["payment"] == retry.body["payment"];
    let text = format!(
        "Both got payment {}; the retry was replayed: {}. The account grew by {paid}.",
        first.body["payment"].as_str().unwrap_or("unknown"),
        if retry.is_replay { "yes" } else { "no" },
    );
    Ok((
        first.status == 200 && is_same && retry.is_replay && !first.is_replay && paid == 25,
        text,
    ))
}

async fn wait_until_held(bank: &Instance, caller: usize) {
    while !bank.is_holding(caller) {
        sleep(SOON / 10).await;
    }
}

const ANN: usize = 0;
const BEN: usize = 1;

/// The delay between two attempts of a caller.
const SOON: Duration = Duration::from_millis(100);

const LONGEST_STEP: Duration = Duration::from_secs(60);
