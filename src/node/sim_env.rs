//! The environment of a simulated process: its randomness and its wall clock, so that a run can be repeated.

use std::cell::RefCell;
use std::time::Duration;

/// The randomness and the wall clock of one simulated process, which replace the system's within
/// [`enter`](Self::enter).
///
/// For tests only: a client that predicts the randomness can release every lock.
///
/// ```
/// use std::time::Duration;
/// use tower_redlock::Redlock;
/// use tower_redlock::test_util::SimEnv;
///
/// let mut env = SimEnv::new(|| 7);
/// env.set_wall_clock(Duration::from_secs(1_000));
/// let token = env.enter(|| {
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
    /// Creates an environment with this source of randomness, in which it is 1970.
    #[must_use]
    pub fn new(random: impl FnMut() -> u64 + 'static) -> Self {
        Self {
            random: Box::new(random),
            wall_clock: Duration::ZERO,
            last_proposal: 0,
        }
    }

    /// Sets the wall clock, as the time since 1970. It stands still until it is set again.
    pub fn set_wall_clock(&mut self, wall_clock: Duration) {
        self.wall_clock = wall_clock;
    }

    /// Runs a closure in this environment, on the current thread.
    ///
    /// # Panics
    ///
    /// Panics if the thread has entered an environment already.
    pub fn enter<T>(&mut self, run: impl FnOnce() -> T) -> T {
        let elsewhere = Self::new(|| unreachable!("the environment is entered"));
        let entered = std::mem::replace(self, elsewhere);
        let outer = CURRENT.replace(Some(entered));
        assert!(
            outer.is_none(),
            "the thread has entered an environment already"
        );
        let result = run();
        if let Some(entered) = CURRENT.take() {
            *self = entered;
        }
        result
    }

    /// Draws a random number from the thread's environment, if it has one.
    pub(super) fn random() -> Option<u64> {
        CURRENT.with_borrow_mut(|env| env.as_mut().map(|env| (env.random)()))
    }

    /// Returns the next proposal of the thread's environment, if it has one.
    pub(super) fn next_proposal() -> Option<u64> {
        CURRENT.with_borrow_mut(|env| {
            let env = env.as_mut()?;
            let now = u64::try_from(env.wall_clock.as_micros()).unwrap_or(u64::MAX / 2);
            env.last_proposal = now.max(env.last_proposal + 1);
            Some(env.last_proposal)
        })
    }
}

opaque_debug! { SimEnv [wall_clock = wall_clock] }
