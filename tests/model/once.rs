//! Requests whose outcome is recorded, without time, and the defects that must be found.
//!
//! What must hold: I1 all who are answered are answered the same; I2 no request that began after an answer
//! executes; I2' nor who began after a majority recorded; I3 two execute only if a lock of one broke
//! before it was decided; I4 no request executes that was told of a record, also between grant and beginning; and no
//! execution releases its key before its outcome is recorded, unless it had no effect. With intents besides: at most one
//! executes, whatever breaks; no node has an intent beside a record; and no request that began after a majority
//! recorded is told that the outcome is unknown. An outcome that is answered as not recorded is outside of these.

use crate::FAR_MORE;
use crate::spec::{May, Proposals, Role, Spec, Variant};
use crate::world::*;

/// Three requests and one that repairs; and the most requests of one lease: `ACQUIRE`, three `CONFIRM`s, one before a late
/// beginning, `RECORD`, `LOOK`, `RECORD` again, `TOPUP`, the release.
type Once<const N: usize> = World<N, 4, 10>;

/// For how long the key is locked: longer than any model takes.
pub(crate) const TTL: u8 = 100;

/// So many requests, which propose any number from 1 to the last.
fn requests(count: usize, proposals: u8) -> Spec {
    let clients = vec![Role::WRITER.for_ticks(TTL); count + 1];
    let spec = Spec::of(&clients, Proposals::UpTo(proposals));
    spec.with(|it| it.promises = &[I1, I2, I2_DECIDED, I3, I4, KEPT])
        .may([May::Execute])
}

/// The same with intents.
fn intending(count: usize, proposals: u8) -> Spec {
    let spec = requests(count, proposals).may([May::Intend]);
    spec.with(|it| it.promises = &[I1, I2, I2_DECIDED, I4, KEPT, ONCE, KNOWN, NO_INTENT])
}

/// Two of equal proposals.
fn two() -> Spec {
    requests(2, 1)
}

/// One node forgets, once so many have a record.
fn forgetful(copies: usize) -> Spec {
    two().with(|it| (it.copies, it.faults) = (copies, 1))
}

#[test]
fn two_once_requests_get_equal_answers_and_execute_twice_only_if_a_lock_breaks() {
    let spec = requests(2, 2).may([May::TopUp]);
    let spec = spec.reaches([REPLAY, REPAIR, FOUND_ANOTHER, CONFIRMED]);
    Once::<3>::holds(spec.reaches([CONFLICT, TWICE, EVERYWHERE]));
}

#[test]
fn once_requests_that_give_up_on_nodes_keep_the_promises() {
    let spec = two().may([May::GiveUp]).within(1_000_000);
    let spec = spec.reaches([REPLAY, REPAIR, FOUND_ITS_OWN]);
    Once::<3>::holds(spec.reaches([UNDECIDED, NOT_RECORDED]));
}

#[test]
fn once_request_that_acquires_again_to_repair_keeps_the_promises() {
    let spec = two().may([May::Repair]).within(2_000_000);
    Once::<3>::holds(spec.reaches([REPLAY, REPAIR, RETRIED]));
}

/// Its own grants would refuse a fresh owner value, so it begins with the old one. It takes a fresh one only
/// if that misses the majority, as the test before this one shows.
#[test]
fn once_request_that_finds_only_its_own_record_sends_it_again() {
    let spec = || {
        two()
            .may([May::GiveUp, May::Repair])
            .reaches([REPLAY, RECORDED_AGAIN])
    };
    Once::<3>::holds(spec().may([May::KeepLocks]));
    Once::<3>::holds(spec().reaches([REPAIR, TWICE]).within(2_000_000));
}

#[test]
fn repeated_acquire_of_a_once_request_keeps_the_promises() {
    let spec = two().with(|it| it.duplicates = 1).within(2_000_000);
    Once::<3>::holds(spec.reaches([REPLAY, REPAIR, CONFLICT, TWICE]));
}

/// A client may wait for long between the grant and the beginning, and hears of records meanwhile.
#[test]
fn client_that_receives_a_record_before_it_begins_does_not_execute() {
    let spec = two().may([May::Wait]);
    Once::<3>::holds(spec.reaches([REPLAY, REPAIR, REFRAINED, TWICE]));
}

/// A lease whose grant is older asks all nodes once more before it begins.
#[test]
fn client_that_begins_late_asks_for_records_again() {
    let spec = two().may([May::Wait, May::BeginLate]).within(2_000_000);
    Once::<3>::holds(spec.reaches([REPLAY, REFRAINED, LATE, TWICE]));
}

#[test]
fn client_that_goes_after_its_beginning_keeps_the_key_unless_it_had_no_effect() {
    let spec = two().reaches([WITHOUT_EFFECT]);
    for spec in [spec, intending(2, 1).reaches([UNKNOWN])] {
        let spec = spec.may([May::Leave]).within(2_000_000);
        Once::<3>::holds(spec.reaches([REPLAY, UNFINISHED]));
    }
}

#[test]
fn large_record_is_read_before_it_is_repaired() {
    let spec = two().may([May::BeLarge, May::TopUp]).within(400_000);
    Once::<3>::holds(spec.reaches([REPLAY, REPAIR, UNDECIDED, FOUND_ANOTHER]));
}

#[test]
fn three_once_requests_get_equal_answers_and_execute_twice_only_if_a_lock_breaks() {
    let spec = requests(3, 1).within(3_000_000);
    Once::<3>::holds(spec.reaches([REPLAY, REPAIR, CONFLICT, TWICE]));
}

#[test]
fn once_requests_to_five_nodes_get_equal_answers() {
    let spec = two().may([May::TopUp]).within(1_000_000);
    Once::<5>::holds(spec.reaches([REPLAY]));
}

// Rules: once.at_most
#[test]
fn intents_let_at_most_one_request_execute_under_any_fault() {
    let holds = |spec: Spec| Once::<3>::holds(spec.reaches([REPLAY, REPAIR, UNKNOWN]));
    let top_up = |proposals| intending(2, proposals).may([May::TopUp]);
    holds(top_up(2));
    let repaired = top_up(1).may([May::GiveUp, May::Repair]);
    holds(repaired.reaches([UNDECIDED, RETRIED, NOT_RECORDED]));
    holds(top_up(1).with(|it| it.duplicates = 1));
    holds(intending(3, 1));
}

#[test]
fn record_on_all_nodes_survives_the_loss_of_one_memory() {
    let spec = forgetful(3).may([May::TopUp]);
    let spec = spec.with(|it| it.promises = &[I1, I2_DECIDED, I4]);
    Once::<3>::holds(spec.reaches([REPLAY, FORGOTTEN]));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_requests_hold_too_when_asked_for() {
    for spec in [requests(3, 1), requests(2, 2).may([May::Repair])] {
        let spec = spec.may([May::TopUp]).within(FAR_MORE);
        Once::<3>::holds(spec.reaches([REPLAY, REPAIR, CONFLICT, TWICE]));
    }
    let spec = intending(3, 1).may([May::GiveUp]).within(FAR_MORE);
    Once::<3>::holds(spec.reaches([REPLAY, REPAIR, UNKNOWN]));
}

#[test]
fn wrong_rules_of_requests_are_found() {
    let finds = Once::<3>::breaks;
    let unequal = || requests(2, 2);
    finds(Variant::ReplaysMinority, requests(3, 1), &[I2]);
    finds(Variant::ReplaysMinority, two().may([May::Repair]), &[I1]);
    finds(Variant::AnswersAfterMinority, two(), &[I1, I2]);
    finds(Variant::RecordsWithoutOwnerCheck, unequal(), &[I3]);
    // The second `RECORD` of one that executed needs the old owner value at the node, as the first does.
    let again = unequal().may([May::GiveUp, May::Repair]);
    finds(Variant::RecordsAgainWithoutOwnerCheck, again, &[I3]);
    finds(Variant::TopsUpEarly, unequal(), &[I3]);
    let leaves = two().may([May::Leave]);
    finds(Variant::ReleasesWithoutRecord, leaves, &[I3, KEPT]);
    finds(Variant::IgnoresRecords, two(), &[I4]);
    finds(Variant::DeafOnceGranted, two().may([May::Wait]), &[I4]);
    // T9: a record is lost. A copy that arrives where a request was granted before does not keep that from executing.
    finds(Variant::Shipped, forgetful(0), &[I2, I2_DECIDED]);
    finds(Variant::Shipped, forgetful(3).may([May::TopUp]), &[I2]);
    // Without intents, and with one that is taken back after executing, two execute.
    finds(Variant::Shipped, two(), &[ONCE]);
    let leaves = intending(2, 1).may([May::Leave]);
    finds(Variant::TakesIntentBack, leaves, &[ONCE]);
}
