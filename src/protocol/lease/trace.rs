//! Traces: what happened to a lease, to be shown and repeated.

use std::fmt;
use std::time::Duration;

use crate::protocol::lease::io::{Event, Input, LeaseRequest};
use crate::protocol::lease::life::Lease;

/// Everything that happened to a lease. As the lease has neither clock nor I/O, this is enough to repeat its life.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Trace {
    /// The lease at its beginning.
    begun: Lease,
    inputs: Vec<(Duration, Input)>,
}

/// What a lease did.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LeaseOutput {
    /// It asked some nodes.
    Request(LeaseRequest),
    /// It told its driver.
    Event(Event),
}

impl Trace {
    /// Begins the trace of a new lease, which has not been told anything.
    pub fn new(begun: Lease) -> Self {
        let inputs = Vec::new();
        Self { begun, inputs }
    }

    /// Adds an input.
    pub fn push(&mut self, input: Input, now: Duration) {
        self.inputs.push((now, input));
    }

    /// Repeats the life of the lease. Returns what it did at its beginning, and after each input.
    pub fn replay(&self) -> Vec<Vec<LeaseOutput>> {
        self.replay_seen(|_, _, _, _| {})
    }

    /// The same; before each input, `see` gets the lease, what it did last, the time and the input.
    pub fn replay_seen(
        &self,
        mut see: impl FnMut(&Lease, &[LeaseOutput], Duration, &Input),
    ) -> Vec<Vec<LeaseOutput>> {
        let mut lease = self.begun.clone();
        let (mut replayed, mut did) = (Vec::new(), outputs(&mut lease));
        for (now, input) in &self.inputs {
            see(&lease, &did, *now, input);
            lease.handle(input.clone(), *now);
            replayed.push(std::mem::replace(&mut did, outputs(&mut lease)));
        }
        replayed.push(did);
        replayed
    }
}

fn outputs(lease: &mut Lease) -> Vec<LeaseOutput> {
    let requests = std::iter::from_fn(|| lease.poll_request()).map(LeaseOutput::Request);
    let mut outputs: Vec<_> = requests.collect();
    outputs.extend(std::iter::from_fn(|| lease.poll_event()).map(LeaseOutput::Event));
    outputs
}

/// One line for each input, and for each request and event that followed it.
impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?} begins: {:?}", self.begun.began, self.begun.spec)?;
        let inputs = self.inputs.iter().map(Some).chain([None]);
        for (outputs, input) in self.replay().iter().zip(inputs) {
            for output in outputs {
                match output {
                    LeaseOutput::Request(request) => writeln!(f, "    -> {request:?}")?,
                    LeaseOutput::Event(event) => writeln!(f, "    => {event:?}")?,
                }
            }
            if let Some((now, input)) = input {
                writeln!(f, "{now:?} {input:?}")?;
            }
        }
        Ok(())
    }
}
