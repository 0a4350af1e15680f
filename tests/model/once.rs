//! The runs of the model of requests whose outcome is recorded, and the defects that it must find.
//!
//! What must hold: I1 all who are answered are answered the same; I2 nobody who began after an answer
//! executes; I2' nor who began after a majority recorded; I3 two execute only if a lock of one broke
//! before it was decided; I4 nobody executes who was told of a record, also between grant and beginning. With intents besides: at most
//! one executes, whatever breaks. An outcome that is answered as not recorded is outside of these.

use crate::records::promises::{
    CONFIRMED, CONFLICT, EVERYWHERE, FORGOTTEN, FOUND_ANOTHER, FOUND_ITS_OWN, I1, I2, I2_DECIDED,
    I3, I4, NOT_RECORDED, ONCE, RECORDED_AGAIN, REFRAINED, REPAIR, REPLAY, RETRIED, TWICE,
    UNDECIDED, UNKNOWN,
};
use crate::records::{Bounds, Records};
use crate::requests::Variant;
use crate::{FAR_MORE, breaks, holds, holds_within, mode};

#[test]
fn two_requests_are_answered_the_same_and_execute_twice_only_if_a_lock_breaks() {
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
fn requests_that_give_up_on_nodes_do_no_harm() {
    let bounds = Bounds {
        timeouts: true,
        reaches: &[REPLAY, REPAIR, FOUND_ITS_OWN, UNDECIDED, NOT_RECORDED],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, nodes given up";
    holds_within(1_000_000, name, Records::<3>::new(bounds));
}

#[test]
fn one_that_executed_and_acquires_again_to_repair_does_no_harm() {
    let bounds = Bounds {
        retry: true,
        reaches: &[REPLAY, REPAIR, RETRIED],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, a repair after executing";
    holds_within(2_000_000, name, Records::<3>::new(bounds));
}

/// Its own locks would refuse a new attempt, so it goes on with the one that has them.
#[test]
fn one_that_finds_only_its_own_record_sends_it_again_and_does_no_harm() {
    let bounds = Bounds {
        retry: true,
        calm: true,
        timeouts: true,
        reaches: &[REPLAY, RECORDED_AGAIN],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, healthy nodes, RECORD again";
    holds_within(2_000_000, name, Records::<3>::new(bounds.clone()));
    let broken = Bounds {
        calm: false,
        reaches: &[REPLAY, REPAIR, RECORDED_AGAIN, TWICE],
        ..bounds
    };
    let name = "2 requests, RECORD again";
    holds_within(2_000_000, name, Records::<3>::new(broken));
}

#[test]
fn a_repeated_acquire_of_a_request_does_no_harm() {
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
fn a_client_that_hears_of_a_record_before_it_begins_does_not_execute() {
    let bounds = Bounds {
        begins: true,
        reaches: &[REPLAY, REPAIR, REFRAINED, TWICE],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, beginning is a step";
    holds_within(2_000_000, name, Records::<3>::new(bounds));
}

#[test]
fn a_client_that_is_deaf_once_granted_executes_beside_a_record_that_it_was_told_of() {
    let bounds = Bounds {
        variant: Variant::DeafOnceGranted,
        begins: true,
        ..Bounds::of(2, 1)
    };
    breaks("deaf once granted", Records::<3>::new(bounds), &[I4]);
}

#[test]
fn three_requests_are_answered_the_same_and_execute_twice_only_if_a_lock_breaks() {
    let bounds = Bounds {
        reaches: &[REPLAY, REPAIR, CONFLICT, TWICE],
        ..Bounds::of(3, 1)
    };
    let name = "3 requests";
    holds_within(3_000_000, name, Records::<3>::new(bounds));
}

#[test]
fn requests_to_five_nodes_are_answered_the_same() {
    let bounds = Bounds {
        top_up: true,
        reaches: &[REPLAY],
        ..Bounds::of(2, 1)
    };
    let name = "5 nodes, 2 requests, TOPUP";
    holds_within(1_000_000, name, Records::<5>::new(bounds));
}

#[test]
fn with_intents_at_most_one_executes_whatever_breaks() {
    let bounds = Bounds {
        intents: true,
        top_up: true,
        promises: &[I1, I2, I2_DECIDED, I4, ONCE],
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
fn a_record_that_all_nodes_had_outlives_the_memory_of_one() {
    let bounds = Bounds {
        top_up: true,
        wipes: 1,
        copies: 3,
        promises: &[I1, I2_DECIDED, I4],
        reaches: &[REPLAY, FORGOTTEN],
        ..Bounds::of(2, 1)
    };
    let name = "2 requests, a wipe after all have the record";
    holds_within(2_000_000, name, Records::<3>::new(bounds));
}

#[test]
fn far_more_states_of_requests_hold_too_when_asked_for() {
    if mode("large") {
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
}

#[test]
fn far_more_states_of_intents_hold_too_when_asked_for() {
    if mode("large") {
        let bounds = Bounds {
            intents: true,
            timeouts: true,
            promises: &[I1, I2, I2_DECIDED, I4, ONCE],
            reaches: &[REPLAY, REPAIR, UNKNOWN],
            ..Bounds::of(3, 1)
        };
        let name = "at most once, 3 requests, nodes given up";
        holds_within(FAR_MORE, name, Records::<3>::new(bounds));
    }
}

#[test]
fn t5_replaying_what_a_minority_has_lets_a_later_request_execute() {
    let bounds = Bounds {
        variant: Variant::ReplaysMinority,
        ..Bounds::of(3, 1)
    };
    breaks("T5 a minority replayed", Records::<3>::new(bounds), &[I2]);
}

#[test]
fn t6_replaying_what_a_minority_has_gives_two_answers() {
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
fn t7_recording_where_another_was_granted_executes_twice_though_no_lock_broke() {
    let bounds = Bounds {
        variant: Variant::RecordsWithoutOwnerCheck,
        ..Bounds::of(2, 2)
    };
    breaks("T7 no owner check", Records::<3>::new(bounds), &[I3]);
}

#[test]
fn topping_up_what_is_not_decided_executes_twice_though_no_lock_broke() {
    let bounds = Bounds {
        variant: Variant::TopsUpEarly,
        ..Bounds::of(2, 2)
    };
    breaks("TOPUP too early", Records::<3>::new(bounds), &[I3]);
}

#[test]
fn releasing_what_is_not_recorded_executes_twice_though_no_lock_broke() {
    let bounds = Bounds {
        variant: Variant::ReleasesWithoutRecord,
        ..Bounds::of(2, 1)
    };
    breaks("RELEASE without a record", Records::<3>::new(bounds), &[I3]);
}

#[test]
fn a_record_that_is_ignored_does_not_keep_from_executing() {
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
fn a_copy_that_comes_after_a_grant_does_not_make_up_for_a_lost_record() {
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
fn taking_an_intent_back_after_executing_lets_another_execute() {
    let bounds = Bounds {
        variant: Variant::TakesIntentBack,
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
