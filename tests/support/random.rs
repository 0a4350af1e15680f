//! Random choices that a test can make again.

/// A small generator (splitmix64), so that a failing seed can be run again.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns one of several.
    #[track_caller]
    pub fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        let chosen = self.below(items.len() as u64);
        items[usize::try_from(chosen).expect("it is below a length")]
    }
}
