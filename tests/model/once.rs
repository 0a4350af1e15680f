//! Requests whose outcome is recorded, without time, and the defects that must be found.
//!
//! What must hold: I1 all who are answered are answered the same; I2 no request that began after an answer
//! executes; I2' nor who began after a majority recorded; I3 two execute only if a lock of one broke
//! before it was decided; I4 no request executes that was told of a record, also between grant and beginning; and no
//! execution releases its key before its outcome is recorded, unless it had no effect. With intents besides: at most one
//! executes, whatever breaks; no node has an intent beside a record; and no request that began after a majority
//! recorded is told that the outcome is unknown. An outcome that is answered as not recorded is outside of these.

use crate::spec::{Executions, Proposals, Role, Spec, Variant};
use crate::world::{
    CONFIRMED, CONFLICT, EVERYWHERE, FORGOTTEN, FOUND_ANOTHER, FOUND_ITS_OWN, I1, I2, I2_DECIDED,
    I3, I4, KEPT, KNOWN, LATE, NO_INTENT, NOT_RECORDED, ONCE, RECORDED_AGAIN, REFRAINED, REPAIR,
    REPLAY, RETRIED, TWICE, UNDECIDED, UNFINISHED, UNKNOWN, WITHOUT_EFFECT, World,
};
use crate::{FAR_MORE, breaks, holds, holds_within};

/// Three requests and one that repairs; and the most requests of one lease: `ACQUIRE`, three `CONFIRM`s, one before a late
/// beginning, `RECORD`, `LOOK`, `RECORD` again, `TOPUP`, the release.
type Once<const N: usize> = World<N, 4, 10>;

/// So many requests, which propose any number from 1 to the last, and may do this.
fn requests(
    count: usize,
    proposals: u8,
    may: impl FnOnce(&mut Executions),
    reaches: &'static [&'static str],
) -> Spec {
    let mut once = Executions::default();
    may(&mut once);
    Spec {
        once: Some(once),
        promises: match once.intents {
            false => &[I1, I2, I2_DECIDED, I3, I4, KEPT],
            true => &[I1, I2, I2_DECIDED, I4, KEPT, ONCE, KNOWN, NO_INTENT],
        },
        reaches,
        ..Spec::of(&vec![Role::WRITER; count + 1], Proposals::UpTo(proposals))
    }
}

fn repeated(spec: Spec) -> Spec {
    spec.with(|it| it.duplicates = 1)
}

/// Clients give up waiting for single answers.
fn giving_up(spec: Spec) -> Spec {
    spec.with(|it| it.timeouts = true)
}

/// One node forgets, once so many have a record.
fn forgetful(copies: usize, top_up: bool) -> Spec {
    let spec = requests(2, 1, |it| (it.copies, it.top_up) = (copies, top_up), &[]);
    spec.with(|it| {
        it.faults = 1;
        it.promises = &[I1, I2, I2_DECIDED, I4];
    })
}

fn plain(_: &mut Executions) {}

fn tops_up(it: &mut Executions) {
    it.top_up = true;
}

fn retries(it: &mut Executions) {
    it.retry = true;
}

fn begins(it: &mut Executions) {
    it.begins = true;
}

fn leaves(it: &mut Executions) {
    it.leaves = true;
}

fn intends(it: &mut Executions) {
    it.intents = true;
}

#[test]
fn two_once_requests_get_equal_answers_and_execute_twice_only_if_a_lock_breaks() {
    let reaches = &[
        REPLAY,
        REPAIR,
        FOUND_ANOTHER,
        CONFIRMED,
        CONFLICT,
        TWICE,
        EVERYWHERE,
    ];
    let name = "2 requests of 1..2, TOPUP";
    holds(name, Once::<3>::new(requests(2, 2, tops_up, reaches)));
}

#[test]
fn once_requests_that_give_up_on_nodes_keep_the_promises() {
    let reaches = &[REPLAY, REPAIR, FOUND_ITS_OWN, UNDECIDED, NOT_RECORDED];
    let spec = giving_up(requests(2, 1, plain, reaches));
    let name = "2 requests, nodes given up";
    holds_within(1_000_000, name, Once::<3>::new(spec));
}

#[test]
fn once_request_that_acquires_again_to_repair_keeps_the_promises() {
    let spec = requests(2, 1, retries, &[REPLAY, REPAIR, RETRIED]);
    let name = "2 requests, a repair after executing";
    holds_within(2_000_000, name, Once::<3>::new(spec));
}

/// Its own grants would refuse a fresh owner value, so it begins with the old one. It takes a fresh one only
/// if that misses the majority, as the test before this one shows.
#[test]
fn once_request_that_finds_only_its_own_record_sends_it_again() {
    let calm = |it: &mut Executions| (it.calm, it.retry) = (true, true);
    let spec = giving_up(requests(2, 1, calm, &[REPLAY, RECORDED_AGAIN]));
    let name = "2 requests, healthy nodes, RECORD again";
    holds(name, Once::<3>::new(spec));
    let reaches = &[REPLAY, REPAIR, RECORDED_AGAIN, TWICE];
    let spec = giving_up(requests(2, 1, retries, reaches));
    let name = "2 requests, RECORD again";
    holds_within(2_000_000, name, Once::<3>::new(spec));
}

#[test]
fn repeated_acquire_of_a_once_request_keeps_the_promises() {
    let reaches = &[REPLAY, REPAIR, CONFLICT, TWICE];
    let spec = repeated(requests(2, 1, plain, reaches));
    let name = "2 requests, a repeated ACQUIRE";
    holds_within(2_000_000, name, Once::<3>::new(spec));
}

/// A client may wait for long between the grant and the beginning, and hears of records meanwhile.
#[test]
fn client_that_receives_a_record_before_it_begins_does_not_execute() {
    let spec = requests(2, 1, begins, &[REPLAY, REPAIR, REFRAINED, TWICE]);
    holds("2 requests, beginning is a step", Once::<3>::new(spec));
}

/// A lease whose grant is older asks all nodes once more before it begins.
#[test]
fn client_that_begins_late_asks_for_records_again() {
    let late = |it: &mut Executions| (it.late, it.begins) = (true, true);
    let spec = requests(2, 1, late, &[REPLAY, REFRAINED, LATE, TWICE]);
    let name = "2 requests, beginning late";
    holds_within(2_000_000, name, Once::<3>::new(spec));
}

#[test]
fn client_that_goes_after_its_beginning_keeps_the_key_unless_it_had_no_effect() {
    let spec = requests(2, 1, leaves, &[REPLAY, WITHOUT_EFFECT, UNFINISHED]);
    let name = "2 requests, which go at any time";
    holds_within(2_000_000, name, Once::<3>::new(spec));
    let intents = |it: &mut Executions| (it.intents, it.leaves) = (true, true);
    let spec = requests(2, 1, intents, &[REPLAY, UNKNOWN, UNFINISHED]);
    let name = "at most once, 2 requests, which go at any time";
    holds_within(2_000_000, name, Once::<3>::new(spec));
}

#[test]
fn large_record_is_read_before_it_is_repaired() {
    let large = |it: &mut Executions| (it.large, it.top_up) = (true, true);
    let spec = requests(2, 1, large, &[REPLAY, REPAIR, UNDECIDED, FOUND_ANOTHER]);
    let name = "2 requests, large records";
    holds_within(400_000, name, Once::<3>::new(spec));
}

#[test]
fn three_once_requests_get_equal_answers_and_execute_twice_only_if_a_lock_breaks() {
    let spec = requests(3, 1, plain, &[REPLAY, REPAIR, CONFLICT, TWICE]);
    holds_within(3_000_000, "3 requests", Once::<3>::new(spec));
}

#[test]
fn once_requests_to_five_nodes_get_equal_answers() {
    let spec = requests(2, 1, tops_up, &[REPLAY]);
    let name = "5 nodes, 2 requests, TOPUP";
    holds_within(1_000_000, name, Once::<5>::new(spec));
}

#[test]
fn intents_let_at_most_one_request_execute_under_any_fault() {
    let reaches = &[REPLAY, REPAIR, UNKNOWN];
    let name = "at most once, 2 requests of 1..2, TOPUP";
    let both = |it: &mut Executions| (it.intents, it.top_up) = (true, true);
    let spec = requests(2, 2, both, reaches);
    holds(name, Once::<3>::new(spec));
    let retry = |it: &mut Executions| (it.retry, it.intents, it.top_up) = (true, true, true);
    let all = &[REPLAY, REPAIR, UNKNOWN, UNDECIDED, RETRIED, NOT_RECORDED];
    let name = "at most once, 2 requests, nodes given up, a repair after executing";
    holds(name, Once::<3>::new(giving_up(requests(2, 1, retry, all))));
    let name = "at most once, 2 requests, a repeated ACQUIRE";
    let spec = repeated(requests(2, 1, both, reaches));
    holds(name, Once::<3>::new(spec));
    let spec = requests(3, 1, intends, reaches);
    holds("at most once, 3 requests", Once::<3>::new(spec));
}

#[test]
fn record_on_all_nodes_survives_the_loss_of_one_memory() {
    let spec = forgetful(3, true).with(|it| {
        it.promises = &[I1, I2_DECIDED, I4];
        it.reaches = &[REPLAY, FORGOTTEN];
    });
    let name = "2 requests, a wipe after all have the record";
    holds(name, Once::<3>::new(spec));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_requests_hold_too_when_asked_for() {
    let reaches = &[REPLAY, REPAIR, CONFLICT, TWICE];
    let name = "3 requests, TOPUP";
    let spec = requests(3, 1, tops_up, reaches);
    holds_within(FAR_MORE, name, Once::<3>::new(spec));
    let both = |it: &mut Executions| (it.retry, it.top_up) = (true, true);
    let name = "2 requests of 1..2, TOPUP, a repair after executing";
    let spec = requests(2, 2, both, reaches);
    holds_within(FAR_MORE, name, Once::<3>::new(spec));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_intents_hold_too_when_asked_for() {
    let spec = giving_up(requests(3, 1, intends, &[REPLAY, REPAIR, UNKNOWN]));
    let name = "at most once, 3 requests, nodes given up";
    holds_within(FAR_MORE, name, Once::<3>::new(spec));
}

/// Each of these promises is broken by this variant.
fn finds(name: &str, variant: Variant, spec: &Spec, promises: &[&'static str]) {
    for promise in promises {
        let spec = spec.clone().with(|it| it.variant = variant);
        breaks(name, Once::<3>::new(spec), &[promise]);
    }
}

#[test]
fn t5_t6_replaying_a_minority_record_gives_two_answers_and_lets_a_later_request_execute() {
    let variant = Variant::ReplaysMinority;
    let three = requests(3, 1, plain, &[]);
    finds("T5 a minority replayed", variant, &three, &[I2]);
    let two = requests(2, 1, retries, &[]);
    finds("T6 a minority replayed", variant, &two, &[I1]);
}

#[test]
fn answering_after_a_minority_recorded_gives_two_answers_and_executes_again() {
    let spec = requests(2, 1, plain, &[]);
    let variant = Variant::AnswersAfterMinority;
    finds("a minority answered", variant, &spec, &[I1, I2]);
}

/// The second `RECORD` of one that executed needs the old owner value at the node, as the first does.
#[test]
fn recording_again_on_nodes_granted_to_another_executes_twice_without_a_broken_lock() {
    let spec = giving_up(requests(2, 2, retries, &[]));
    let variant = Variant::RecordsAgainWithoutOwnerCheck;
    finds("RECORD again, no owner check", variant, &spec, &[I3]);
}

#[test]
fn t7_recording_where_another_was_granted_or_too_early_executes_twice_without_a_broken_lock() {
    let spec = requests(2, 2, plain, &[]);
    let variant = Variant::RecordsWithoutOwnerCheck;
    finds("T7 no owner check", variant, &spec, &[I3]);
    finds("TOPUP too early", Variant::TopsUpEarly, &spec, &[I3]);
}

#[test]
fn releasing_an_unrecorded_execution_executes_twice_without_a_broken_lock() {
    let spec = requests(2, 1, leaves, &[]);
    let variant = Variant::ReleasesWithoutRecord;
    finds("RELEASE without a record", variant, &spec, &[I3, KEPT]);
}

#[test]
fn ignored_record_does_not_prevent_an_execution() {
    let spec = requests(2, 1, plain, &[]);
    finds("a record ignored", Variant::IgnoresRecords, &spec, &[I4]);
    let spec = requests(2, 1, begins, &[]);
    finds("deaf once granted", Variant::DeafOnceGranted, &spec, &[I4]);
}

/// A copy that arrives where a request was granted before does not keep that from executing.
#[test]
fn t9_a_lost_record_lets_a_later_request_execute() {
    let promises = &[I2, I2_DECIDED];
    let lost = forgetful(0, false);
    finds("T9 a lost record", Variant::Shipped, &lost, promises);
    let name = "a lost record, TOPUP after a grant";
    finds(name, Variant::Shipped, &forgetful(3, true), &[I2]);
}

#[test]
fn without_an_intent_or_with_one_withdrawn_after_executing_two_execute() {
    let spec = requests(2, 1, plain, &[]).with(|it| it.promises = &[ONCE]);
    finds("no intents", Variant::Shipped, &spec, &[ONCE]);
    let goes = |it: &mut Executions| (it.intents, it.leaves) = (true, true);
    let spec = requests(2, 1, goes, &[]).with(|it| it.promises = &[ONCE]);
    let variant = Variant::TakesIntentBack;
    finds("an intent taken back", variant, &spec, &[ONCE]);
}
