//! Files that need each other, directly or through others.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::imports::Arrow;

/// Every shortest circle that an arrow is part of, as arrows in order; each circle once.
pub(crate) fn circles(arrows: &[Arrow]) -> Vec<Vec<&Arrow>> {
    let mut from: BTreeMap<usize, Vec<&Arrow>> = BTreeMap::new();
    for arrow in arrows {
        from.entry(arrow.from).or_default().push(arrow);
    }
    let mut seen = BTreeSet::new();
    let mut circles = Vec::new();
    for arrow in arrows {
        let Some(back) = shortest_way(&from, arrow.to, arrow.from) else {
            continue;
        };
        let mut circle = vec![arrow];
        circle.extend(back);
        let files: BTreeSet<usize> = circle.iter().map(|arrow| arrow.from).collect();
        if seen.insert(files) {
            circles.push(circle);
        }
    }
    circles
}

fn shortest_way<'a>(
    from: &BTreeMap<usize, Vec<&'a Arrow>>,
    start: usize,
    end: usize,
) -> Option<Vec<&'a Arrow>> {
    // The arrow that led to each file first.
    let mut reached: BTreeMap<usize, &Arrow> = BTreeMap::new();
    let mut open = VecDeque::from([start]);
    while let Some(at) = open.pop_front() {
        for arrow in from.get(&at).into_iter().flatten() {
            if arrow.to != start && !reached.contains_key(&arrow.to) {
                reached.insert(arrow.to, arrow);
                open.push_back(arrow.to);
            }
        }
    }
    let mut way = Vec::new();
    let mut at = end;
    while at != start {
        let arrow = *reached.get(&at)?;
        way.push(arrow);
        at = arrow.from;
    }
    way.reverse();
    Some(way)
}

/// `a.rs -> b.rs -> a.rs (a.rs:3 Item, b.rs:5 Other)`.
pub(crate) fn shown(circle: &[&Arrow], name: impl Fn(usize) -> String) -> String {
    let files = circle.iter().map(|arrow| name(arrow.from));
    let files: Vec<String> = files.chain([name(circle[0].from)]).collect();
    let reasons = circle.iter().map(|arrow| shown_arrow(arrow, &name));
    let reasons: Vec<String> = reasons.collect();
    format!("{} ({})", files.join(" -> "), reasons.join(", "))
}

pub(crate) fn shown_arrow(arrow: &Arrow, name: impl Fn(usize) -> String) -> String {
    format!("{}:{} {}", name(arrow.from), arrow.line, arrow.item)
}
