//! Vectors, stability and balance of the placement.

use super::slotted as slotted_in;
use super::*;

/// The rows of the table in the documentation, cell by cell.
fn vectors() -> Vec<Vec<String>> {
    let rows = include_str!("../placement.rs").lines();
    let rows = rows.filter_map(|line| line.strip_prefix("/// | `")?.strip_suffix(" |"));
    let cells = |row: &str| {
        row.split('|')
            .map(|cell| cell.trim().trim_matches('`').into())
            .collect()
    };
    rows.map(cells).collect()
}

fn keys(count: u32) -> impl Iterator<Item = LockKey> {
    (0..count).map(|number| LockKey::from(("account", number)))
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| number.to_string()).collect()
}

#[test]
fn vectors_of_the_documentation_hold() {
    let vectors = vectors();
    assert_eq!(vectors.len(), 10);
    let names = ["0", "1", "g2"];
    for cells in &vectors {
        let key = LockKey::from(cells[1].as_str());
        for (name, weight) in names.iter().zip(&cells[2..5]) {
            assert_eq!(
                format!("{:016x}", Placement::weight(&key, name)),
                *weight,
                "{key:?} in {name}"
            );
        }
        assert_eq!(names[Placement::new(["0", "1"]).group_of(&key)], cells[5]);
        assert_eq!(names[Placement::new(names).group_of(&key)], cells[6]);
    }
    assert_eq!(
        vectors[4][2..],
        vectors[5][2..],
        "a slot is placed as its key"
    );
    assert_eq!(vectors[9][2..], vectors[5][2..], "and so is its slot");
    assert_ne!(vectors[6][2..], vectors[7][2..], "there is no slot 64");
}

#[test]
fn group_does_not_depend_on_the_order_of_the_groups() {
    let (names, reversed) = (["0", "1", "g2"], ["g2", "1", "0"]);
    let (one, other) = (Placement::new(names), Placement::new(reversed));
    for key in keys(1_000) {
        assert_eq!(names[one.group_of(&key)], reversed[other.group_of(&key)]);
    }
}

/// A new group takes its share and nothing else moves; the same backwards when a group is removed.
#[test]
fn another_group_moves_its_share_of_the_keys_and_no_others() {
    const KEYS: u32 = 20_000;
    for count in 1..=16 {
        let (before, after) = (
            Placement::new(names(count)),
            Placement::new(names(count + 1)),
        );
        let mut moved = 0;
        for key in keys(KEYS) {
            let (from, to) = (before.group_of(&key), after.group_of(&key));
            if from != to {
                assert_eq!(to, count, "{key:?} moved between groups that both have");
                moved += 1;
            }
        }
        let count = u32::try_from(count + 1).unwrap();
        let most = KEYS / count + KEYS / 20;
        assert!(moved <= most, "{moved} keys moved to one of {count}");
        let fair = KEYS / count;
        let is_fair = (fair * 9 / 10..fair * 11 / 10).contains(&moved);
        assert!(is_fair, "{moved} keys moved instead of {fair}");
    }
}

#[test]
fn groups_have_like_numbers_of_keys_whatever_their_names() {
    for names in [
        names(16),
        (0..16)
            .map(|n| format!("eu-west-1{}", char::from(b'a' + n)))
            .collect(),
    ] {
        let placement = Placement::new(names.clone());
        let mut counts = [0_u32; 16];
        let numbered = (0..64_000_u32).map(|n| LockKey::from(n.to_string()));
        for key in keys(64_000).chain(numbered) {
            counts[placement.group_of(&key)] += 1;
        }
        for (name, count) in names.iter().zip(counts) {
            assert!(
                (7_400..8_600).contains(&count),
                "{name} has {count} of 128,000 keys"
            );
        }
    }
}

#[test]
fn only_keys_of_slots_are_placed_as_others() {
    let slotted = |key: &str| slotted_in(key.as_bytes()).map(|key| key.escape_ascii().to_string());
    let of = |key: LockKey| slotted(std::str::from_utf8(key.as_bytes()).unwrap());
    assert_eq!(of(("a", "slot", 0).into()).as_deref(), Some("a"));
    assert_eq!(of(("a", "slot", 63).into()).as_deref(), Some("a"));
    assert_eq!(
        of((("a", "b"), "slot", 1).into()).as_deref(),
        Some("1:a,1:b,")
    );
    assert_eq!(
        of((("a", "slot", 1), "slot", 2).into()).as_deref(),
        Some("1:a,4:slot,1:1,")
    );
    for other in [
        LockKey::from(("a", "slot", 64)),
        LockKey::from(("a", "slot", "01")),
        LockKey::from(("a", "slot", "+1")),
        LockKey::from(("a", "slot", "x")),
        LockKey::from(("a", "slot", "")),
        LockKey::from(("a", "slot")),
        LockKey::from(("a", "b", "slot", 1)),
        LockKey::from(("a", "slots", 1)),
        LockKey::from("+1:a,4:slot,1:1,"),
        LockKey::from("01:a,4:slot,1:1,"),
        LockKey::from("1:a,4:slot,1:1,,"),
        LockKey::from("9:a,4:slot,1:1,"),
        LockKey::from("99999999999999999999999:a,4:slot,1:1,"),
        LockKey::from(":a,4:slot,1:1,"),
        LockKey::from(""),
    ] {
        assert_eq!(of(other.clone()), None, "{other:?}");
    }
}

#[test]
fn equal_weights_are_decided_by_the_names() {
    // Their hashes are equal.
    let (first, second) = ("8yn0iYCKYHlIj4-BwPqk", "GReLUrM4wMqfg9yzV3KQ");
    assert_eq!(fnv(first.as_bytes()), fnv(second.as_bytes()));
    assert_eq!(
        Placement::new([first, second]).group_of(&LockKey::from("k")),
        0
    );
    assert_eq!(
        Placement::new([second, first]).group_of(&LockKey::from("k")),
        1
    );
    assert_eq!(Placement::new(["a"]).group_of(&LockKey::from("k")), 0);
    assert_eq!(
        Placement::new(Vec::<String>::new()).group_of(&LockKey::from("k")),
        0
    );
}
