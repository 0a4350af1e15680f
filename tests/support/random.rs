//! Random choices that a test can repeat from a seed.

use std::time::Duration;

/// A small generator (splitmix64), so that a failing seed can be run again.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns 64 random bits.
    pub fn next_number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next_number() % end
    }

    /// Returns a position in a list of `len` items.
    #[track_caller]
    pub fn index(&mut self, len: usize) -> usize {
        let chosen = self.below(len as u64);
        usize::try_from(chosen).expect("it is below a length")
    }

    /// Returns one of several items.
    #[track_caller]
    pub fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }

    /// Returns true once in `times` calls, on average.
    pub fn is_one_in(&mut self, times: usize) -> bool {
        self.index(times) == 0
    }

    /// Returns a duration of at most `longest`.
    pub fn up_to(&mut self, longest: Duration) -> Duration {
        let micros = u64::try_from(longest.as_micros()).expect("a test's durations are short");
        Duration::from_micros(self.below(micros + 1))
    }
}
