//! The lease task: acquire, hold and renew, release; one sequential story.

mod acquire;
mod attempt;
mod hold;
mod recording;
mod release;
mod run;
mod state;

pub(super) use run::{Order, Story};
