//! A world of one's own for a simulation: its randomness and its wall clock, so that it can be repeated.

use std::cell::RefCell;
use std::fmt;
use std::time::Duration;

/// What the code of one simulated process is given instead of the system's randomness and wall
/// clock, while it runs inside of [`enter`](Self::enter).
///
/// Not for anything but tests: whoever can predict the randomness can release every lock.
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::Redlock;
/// use tower_redlock::test_util::SimEnv;
///
/// let mut world = SimEnv::new(|| 7);
/// world.set_wall_clock(Duration::from_secs(1_000));
/// let token = world.enter(|| {
///     let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
///     runtime.unwrap().block_on(async {
///         Redlock::in_memory(3).lock("k").await.unwrap().fencing_token()
///     })
/// });
/// assert_eq!(token.unwrap().as_u64(), 1_000_000_000);
/// ```
pub struct SimEnv {
    random: Box<dyn FnMut() -> u64>,
    wall_clock: Duration,
    last_proposal: u64,
}

thread_local! {
    static CURRENT: RefCell<Option<SimEnv>> = const { RefCell::new(None) };
}

impl SimEnv {
    /// A world with a source of randomness, in which it is 1970.
    #[must_use]
    pub fn new(random: impl FnMut() -> u64 + 'static) -> Self {
        Self {
            random: Box::new(random),
            wall_clock: Duration::ZERO,
            last_proposal: 0,
        }
    }

    /// Sets the wall clock, counted from 1970. It stands still until it is set again.
    pub fn set_wall_clock(&mut self, wall_clock: Duration) {
        self.wall_clock = wall_clock;
    }

    /// Runs something in this world, on this thread.
    ///
    /// # Panics
    ///
    /// If the thread is in a world already.
    pub fn enter<T>(&mut self, run: impl FnOnce() -> T) -> T {
        let elsewhere = Self::new(|| unreachable!("the world is entered"));
        let entered = std::mem::replace(self, elsewhere);
        let outer = CURRENT.replace(Some(entered));
        assert!(outer.is_none(), "one world cannot be entered from another");
        let result = run();
        if let Some(entered) = CURRENT.take() {
            *self = entered;
        }
        result
    }

    /// Draws a random number from the world that the thread is in, if it is in one.
    pub(super) fn random() -> Option<u64> {
        CURRENT.with_borrow_mut(|world| world.as_mut().map(|world| (world.random)()))
    }

    /// Proposes the next number in the world that the thread is in, if it is in one.
    pub(super) fn next_proposal() -> Option<u64> {
        CURRENT.with_borrow_mut(|world| {
            let world = world.as_mut()?;
            let now = u64::try_from(world.wall_clock.as_micros()).unwrap_or(u64::MAX / 2);
            world.last_proposal = now.max(world.last_proposal + 1);
            Some(world.last_proposal)
        })
    }
}

/// By hand, because a source of randomness has nothing to show.
impl fmt::Debug for SimEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimEnv")
            .field("wall_clock", &self.wall_clock)
            .finish_non_exhaustive()
    }
}
