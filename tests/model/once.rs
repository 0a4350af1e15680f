//! The runs of the model of requests whose outcome is recorded, and the defects that it must find.
//!
//! What must hold: I1 all who are answered are answered the same; I2 no request that began after an answer
//! executes; I2' nor who began after a majority recorded; I3 two execute only if a lock of one broke
//! before it was decided; I4 no request executes that was told of a record, also between grant and beginning; and no
//! execution releases its key before its outcome is recorded, unless it had no effect. With intents besides: at most one
//! executes, whatever breaks; no node has an intent beside a record; and no request that began after a majority
//! recorded is told that the outcome is unknown. An outcome that is answered as not recorded is outside of these.

use crate::records::promises::{
    CONFIRMED, CONFLICT, EVERYWHERE, FORGOTTEN, FOUND_ANOTHER, FOUND_ITS_OWN, I1, I2, I2_DECIDED,
    I3, I4, KEPT, KNOWN, LATE, NOT_RECORDED, ONCE, RECORDED_AGAIN, REFRAINED, REPAIR, REPLAY,
    RETRIED, SETTLED, TWICE, UNDECIDED, UNFINISHED, UNKNOWN, WITHOUT_EFFECT,
};
use crate::records::{Bounds, Records, Variant};
use crate::{FAR_MORE, breaks, holds, holds_within};

#[test]
fn two_once_requests_get_equal_answers_and_execute_twice_only_if_a_lock_breaks() {
    let bounds = Bounds {
        top_up: true,
        reaches: &[
            REPLAY,
            REPAIR,
            FOUND_ANOTHER,
            CONFIRMED,
            CONFLICT,
            TWICE,
            EVERYWHERE,
        ],
        ..Bounds::of(2, 2)
    };
    let name = "2 requests of 1..2, TOPUP";
    holds(name, Records::<3>::new(bounds));
}

#[test]
fn once_requests_that_give_up_on_nodes_keep_the_promises() {
    let bounds = Bounds {
        timeouts: true,
        reaches: &[REPLAY, REPAIR, FOUND_ITS_OWN, UNDECIDED, NOT_RECORDED],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, nodes given up";
    holds_within(1_000_000, name, Records::<3>::new(bounds));
}

#[test]
fn once_request_that_acquires_again_to_repair_keeps_the_promises() {
    let bounds = Bounds {
        retry: true,
        reaches: &[REPLAY, REPAIR, RETRIED],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, a repair after executing";
    holds_within(2_000_000, name, Records::<3>::new(bounds));
}

/// Its own grants would refuse a fresh owner value, so it begins with the old one. It takes a fresh one only
/// if that misses the majority, as the test before this one shows.
#[test]
fn once_request_that_finds_only_its_own_record_sends_it_again() {
    let bounds = Bounds {
        retry: true,
        calm: true,
        timeouts: true,
        reaches: &[REPLAY, RECORDED_AGAIN],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, healthy nodes, RECORD again";
    holds(name, Records::<3>::new(bounds.clone()));
    let broken = Bounds {
        calm: false,
        reaches: &[REPLAY, REPAIR, RECORDED_AGAIN, TWICE],
        ..bounds
    };
    let name = "2 requests, RECORD again";
    holds_within(2_000_000, name, Records::<3>::new(broken));
}

#[test]
fn repeated_acquire_of_a_once_request_keeps_the_promises() {
    let bounds = Bounds {
        duplicates: 1,
        reaches: &[REPLAY, REPAIR, CONFLICT, TWICE],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, a repeated ACQUIRE";
    holds_within(2_000_000, name, Records::<3>::new(bounds));
}

/// A client may wait for long between the grant and the beginning, and hears of records meanwhile.
#[test]
fn client_that_receives_a_record_before_it_begins_does_not_execute() {
    let bounds = Bounds {
        begins: true,
        reaches: &[REPLAY, REPAIR, REFRAINED, TWICE],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, beginning is a step";
    holds(name, Records::<3>::new(bounds));
}

/// A lease whose grant is older asks all nodes once more before it begins.
#[test]
fn client_that_begins_late_asks_for_records_again() {
    let bounds = Bounds {
        begins: true,
        late: true,
        reaches: &[REPLAY, REFRAINED, LATE, TWICE],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, beginning late";
    holds_within(2_000_000, name, Records::<3>::new(bounds));
}

#[test]
fn client_that_goes_after_its_beginning_keeps_the_key_unless_it_had_no_effect() {
    let bounds = Bounds {
        leaves: true,
        reaches: &[REPLAY, WITHOUT_EFFECT, UNFINISHED],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, which go at any time";
    holds_within(2_000_000, name, Records::<3>::new(bounds.clone()));
    let intents = Bounds {
        intents: true,
        promises: &[I1, I2, I2_DECIDED, I4, KEPT, ONCE, KNOWN, SETTLED],
        reaches: &[REPLAY, UNKNOWN, UNFINISHED],
        ..bounds
    };
    let name = "at most once, 2 requests, which go at any time";
    holds_within(2_000_000, name, Records::<3>::new(intents));
}

#[test]
fn large_record_is_read_before_it_is_repaired() {
    let bounds = Bounds {
        large: true,
        top_up: true,
        reaches: &[REPLAY, REPAIR, UNDECIDED, FOUND_ANOTHER],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, large records";
    holds_within(400_000, name, Records::<3>::new(bounds));
}

#[test]
fn client_that_ignores_records_after_its_grant_executes_beside_a_received_record() {
    let bounds = Bounds {
        variant: Variant::DeafOnceGranted,
        begins: true,
        ..Bounds::of(2, 1)
    };
    breaks("deaf once granted", Records::<3>::new(bounds), &[I4]);
}

#[test]
fn three_once_requests_get_equal_answers_and_execute_twice_only_if_a_lock_breaks() {
    let bounds = Bounds {
        reaches: &[REPLAY, REPAIR, CONFLICT, TWICE],
        ..Bounds::of(3, 1)
    };
    let name = "3 requests";
    holds_within(3_000_000, name, Records::<3>::new(bounds));
}

#[test]
fn once_requests_to_five_nodes_get_equal_answers() {
    let bounds = Bounds {
        top_up: true,
        reaches: &[REPLAY],
        ..Bounds::of(2, 1)
    };
    let name = "5 nodes, 2 requests, TOPUP";
    holds_within(1_000_000, name, Records::<5>::new(bounds));
}

#[test]
fn intents_let_at_most_one_request_execute_under_any_fault() {
    let bounds = Bounds {
        intents: true,
        top_up: true,
        promises: &[I1, I2, I2_DECIDED, I4, KEPT, ONCE, KNOWN, SETTLED],
        reaches: &[REPLAY, REPAIR, UNKNOWN],
        ..Bounds::of(2, 2)
    };
    let name = "at most once, 2 requests of 1..2, TOPUP";
    holds(name, Records::<3>::new(bounds.clone()));
    let given_up = Bounds {
        proposals: 1,
        timeouts: true,
        retry: true,
        reaches: &[REPLAY, REPAIR, UNKNOWN, UNDECIDED, RETRIED, NOT_RECORDED],
        ..bounds
    };
    let name = "at most once, 2 requests, nodes given up, a repair after executing";
    holds(name, Records::<3>::new(given_up));
    let repeated = Bounds {
        proposals: 1,
        duplicates: 1,
        ..bounds
    };
    let name = "at most once, 2 requests, a repeated ACQUIRE";
    holds(name, Records::<3>::new(repeated));
    let three = Bounds {
        requests: 3,
        proposals: 1,
        top_up: false,
        ..bounds
    };
    let name = "at most once, 3 requests";
    holds(name, Records::<3>::new(three));
}

#[test]
fn record_on_all_nodes_survives_the_loss_of_one_memory() {
    let bounds = Bounds {
        top_up: true,
        wipes: 1,
        copies: 3,
        promises: &[I1, I2_DECIDED, I4],
        reaches: &[REPLAY, FORGOTTEN],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, a wipe after all have the record";
    holds(name, Records::<3>::new(bounds));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_requests_hold_too_when_asked_for() {
    let bounds = Bounds {
        top_up: true,
        reaches: &[REPLAY, REPAIR, CONFLICT, TWICE],
        ..Bounds::of(3, 1)
    };
    let name = "3 requests, TOPUP";
    holds_within(FAR_MORE, name, Records::<3>::new(bounds));
    let bounds = Bounds {
        top_up: true,
        retry: true,
        reaches: &[REPLAY, REPAIR, CONFLICT, TWICE],
        ..Bounds::of(2, 2)
    };
    let name = "2 requests of 1..2, TOPUP, a repair after executing";
    holds_within(FAR_MORE, name, Records::<3>::new(bounds));
}

#[test]
#[ignore = "it takes minutes; .ci/weekly runs it, and the documentation of this program has the command"]
fn far_more_states_of_intents_hold_too_when_asked_for() {
    let bounds = Bounds {
        intents: true,
        timeouts: true,
        promises: &[I1, I2, I2_DECIDED, I4, KEPT, ONCE, KNOWN, SETTLED],
        reaches: &[REPLAY, REPAIR, UNKNOWN],
        ..Bounds::of(3, 1)
    };
    let name = "at most once, 3 requests, nodes given up";
    holds_within(FAR_MORE, name, Records::<3>::new(bounds));
}

#[test]
fn t5_replaying_a_minority_record_lets_a_later_request_execute() {
    let bounds = Bounds {
        variant: Variant::ReplaysMinority,
        ..Bounds::of(3, 1)
    };
    breaks("T5 a minority replayed", Records::<3>::new(bounds), &[I2]);
}

#[test]
fn t6_replaying_a_minority_record_gives_two_answers() {
    let bounds = Bounds {
        variant: Variant::ReplaysMinority,
        retry: true,
        ..Bounds::of(2, 1)
    };
    breaks("T6 a minority replayed", Records::<3>::new(bounds), &[I1]);
}

#[test]
fn answering_after_a_minority_recorded_gives_two_answers_and_executes_again() {
    let bounds = Bounds {
        variant: Variant::AnswersAfterMinority,
        ..Bounds::of(2, 1)
    };
    for promise in [I1, I2] {
        let model = Records::<3>::new(bounds.clone());
        breaks("a minority answered", model, &[promise]);
    }
}

#[test]
fn t7_recording_on_nodes_granted_to_another_executes_twice_without_a_broken_lock() {
    let bounds = Bounds {
        variant: Variant::RecordsWithoutOwnerCheck,
        ..Bounds::of(2, 2)
    };
    breaks("T7 no owner check", Records::<3>::new(bounds), &[I3]);
}

/// The second `RECORD` of one that executed needs the old owner value at the node, as the first does.
#[test]
fn recording_again_on_nodes_granted_to_another_executes_twice_without_a_broken_lock() {
    let bounds = Bounds {
        variant: Variant::RecordsAgainWithoutOwnerCheck,
        retry: true,
        timeouts: true,
        ..Bounds::of(2, 2)
    };
    let name = "RECORD again, no owner check";
    breaks(name, Records::<3>::new(bounds), &[I3]);
}

#[test]
fn topping_up_an_undecided_record_executes_twice_without_a_broken_lock() {
    let bounds = Bounds {
        variant: Variant::TopsUpEarly,
        ..Bounds::of(2, 2)
    };
    breaks("TOPUP too early", Records::<3>::new(bounds), &[I3]);
}

#[test]
fn releasing_an_unrecorded_execution_executes_twice_without_a_broken_lock() {
    let bounds = Bounds {
        variant: Variant::ReleasesWithoutRecord,
        leaves: true,
        ..Bounds::of(2, 1)
    };
    for promise in [I3, KEPT] {
        let model = Records::<3>::new(bounds.clone());
        breaks("RELEASE without a record", model, &[promise]);
    }
}

#[test]
fn ignored_record_does_not_prevent_an_execution() {
    let bounds = Bounds {
        variant: Variant::IgnoresRecords,
        ..Bounds::of(2, 1)
    };
    breaks("a record ignored", Records::<3>::new(bounds), &[I4]);
}

#[test]
fn t9_a_lost_record_lets_a_later_request_execute() {
    let bounds = Bounds {
        wipes: 1,
        ..Bounds::of(2, 1)
    };
    for promise in [I2, I2_DECIDED] {
        let model = Records::<3>::new(bounds.clone());
        breaks("T9 a lost record", model, &[promise]);
    }
}

/// A copy that arrives where a request was granted before does not keep that from executing.
#[test]
fn copy_made_after_a_grant_does_not_replace_a_lost_record() {
    let bounds = Bounds {
        top_up: true,
        wipes: 1,
        copies: 3,
        ..Bounds::of(2, 1)
    };
    let name = "a lost record, TOPUP after a grant";
    breaks(name, Records::<3>::new(bounds), &[I2]);
}

#[test]
fn withdrawing_an_intent_after_executing_lets_another_execute() {
    let bounds = Bounds {
        variant: Variant::TakesIntentBack,
        leaves: true,
        intents: true,
        promises: &[ONCE],
        ..Bounds::of(2, 1)
    };
    breaks("an intent taken back", Records::<3>::new(bounds), &[ONCE]);
}

#[test]
fn without_intents_a_broken_lock_lets_two_execute() {
    let bounds = Bounds {
        promises: &[ONCE],
        ..Bounds::of(2, 1)
    };
    breaks("no intents", Records::<3>::new(bounds), &[ONCE]);
}
