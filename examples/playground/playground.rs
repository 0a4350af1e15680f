//! The playground: the instance that the page shows, its commands, and the tour.

use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::board::Power;
use crate::events::{Events, lock};
use crate::instance::{Instance, Weakness};
use crate::tour::{self, STEPS};
use crate::{CALLERS, NODES, SERVERS};

/// Everything that the page talks to.
#[derive(Debug)]
pub(crate) struct Playground {
    pub(crate) events: Arc<Events>,
    with_redis: bool,
    /// Held while a step starts, and while all is reset: a step must not start in between.
    switch: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    main: Arc<Instance>,
    /// Shown in place of the main one.
    weak: Option<Arc<Instance>>,
    next_instance: u64,
    tour: Tour,
}

#[derive(Debug, Default)]
struct Tour {
    step: Option<usize>,
    running: Option<JoinHandle<()>>,
    results: Vec<Value>,
}

/// A command of the page.
#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub(crate) enum Order {
    Kill {
        node: usize,
    },
    Restart {
        node: usize,
    },
    Hang {
        node: usize,
    },
    Resume {
        node: usize,
    },
    Wipe {
        node: usize,
    },
    Delay {
        node: usize,
        ms: u64,
    },
    Cut {
        node: usize,
        server: String,
        on: bool,
    },
    Callers {
        count: usize,
    },
    Load {
        on: bool,
    },
    Pause {
        caller: String,
    },
    Disconnect {
        caller: String,
    },
    Tour {
        step: usize,
    },
    Reset,
}

/// A command that cannot be carried out, and why.
#[derive(Debug)]
pub(crate) enum Refused {
    /// It makes no sense.
    Invalid(String),
    /// It makes no sense now.
    Conflict(String),
}

impl Playground {
    pub(crate) async fn start(with_redis: bool) -> Result<Arc<Self>, Box<dyn Error + Send + Sync>> {
        let events = Events::new();
        let main = Instance::start(events.feed(1), None, with_redis).await?;
        main.set_load(true);
        Ok(Arc::new(Self {
            events,
            with_redis,
            switch: tokio::sync::Mutex::default(),
            state: Mutex::new(State {
                main,
                weak: None,
                next_instance: 2,
                tour: Tour::default(),
            }),
        }))
    }

    /// Returns the instance that the page shows.
    pub(crate) fn shown(&self) -> Arc<Instance> {
        let state = lock(&self.state);
        Arc::clone(state.weak.as_ref().unwrap_or(&state.main))
    }

    /// Shows the main instance, and ends a weak one.
    pub(crate) fn show_main(&self) -> Arc<Instance> {
        let mut state = lock(&self.state);
        state.weak = None;
        Arc::clone(&state.main)
    }

    /// Shows a new instance with a weak setting.
    pub(crate) async fn show_weak(
        &self,
        weakness: Weakness,
    ) -> Result<Arc<Instance>, Box<dyn Error + Send + Sync>> {
        let weak = self.instance(Some(weakness)).await?;
        lock(&self.state).weak = Some(Arc::clone(&weak));
        Ok(weak)
    }

    /// Returns what the page shows, as one event.
    pub(crate) fn view(&self) -> Value {
        let mode = if self.with_redis { "redis" } else { "embedded" };
        let mut view = self.shown().view(mode);
        let state = lock(&self.state);
        view["tour"] = json!({
            "step": state.tour.step,
            "running": state.tour.running.is_some(),
            "results": state.tour.results,
        });
        view
    }

    /// Carries out a command of the page.
    pub(crate) async fn execute(self: &Arc<Self>, order: Order) -> Result<(), Refused> {
        let shown = self.shown();
        let cluster = &shown.cluster;
        let done = match order {
            Order::Kill { node } => {
                cluster.kill(known(node)?);
                Ok(())
            }
            Order::Restart { node } => {
                expect(&shown, node, Power::Down)?;
                cluster.restart(node).await
            }
            Order::Hang { node } => {
                expect(&shown, node, Power::Up)?;
                cluster.hang(node)
            }
            Order::Resume { node } => {
                expect(&shown, node, Power::Hung)?;
                cluster.resume(node)
            }
            Order::Wipe { node } => {
                expect(&shown, node, Power::Up)?;
                cluster.wipe(node).await
            }
            Order::Delay { node, ms } => {
                shown
                    .board
                    .set_delay(known(node)?, Duration::from_millis(ms.min(MAX_DELAY)));
                Ok(())
            }
            Order::Cut { node, server, on } => {
                let server = number(&SERVERS, &server)?;
                shown.board.cut(known(node)?, server, on);
                Ok(())
            }
            Order::Callers { count } if (3..=CALLERS.len()).contains(&count) => {
                shown.set_callers(count);
                Ok(())
            }
            Order::Callers { count } => {
                return Err(Refused::Invalid(format!(
                    "{count} callers: use 3 to {}",
                    CALLERS.len()
                )));
            }
            Order::Load { on } => {
                shown.set_load(on);
                Ok(())
            }
            Order::Pause { caller } => {
                shown.pause(number(&CALLERS, &caller)?);
                Ok(())
            }
            Order::Disconnect { caller } => {
                shown.disconnect(number(&CALLERS, &caller)?);
                Ok(())
            }
            Order::Tour { step } => return self.start_step(step).await,
            Order::Reset => return self.reset().await,
        };
        done.map_err(|error| Refused::Conflict(error.to_string()))
    }

    /// Ends the servers that it started, also if a page is still connected.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        if let Some(step) = state.tour.running.take() {
            step.abort();
        }
        for instance in state.weak.iter().chain([&state.main]) {
            (0..NODES).for_each(|node| instance.cluster.kill(node));
        }
    }

    async fn start_step(self: &Arc<Self>, step: usize) -> Result<(), Refused> {
        if !(1..=STEPS.len()).contains(&step) {
            return Err(Refused::Invalid(format!("the tour has no step {step}")));
        }
        let _switch = self.switch.lock().await;
        let mut state = lock(&self.state);
        if state.tour.running.is_some() {
            return Err(Refused::Conflict("a step of the tour is running".into()));
        }
        let playground = Arc::clone(self);
        let task = tokio::spawn(async move {
            let result = tour::run(&playground, step).await;
            let (is_as_promised, text) = result.unwrap_or_else(|error| (false, error.to_string()));
            let mut state = lock(&playground.state);
            state.tour.running = None;
            state.tour.results.retain(|result| result["step"] != step);
            let result = json!({"step": step, "ok": is_as_promised, "text": text});
            state.tour.results.push(result);
        });
        state.tour.step = Some(step);
        state.tour.running = Some(task);
        Ok(())
    }

    async fn reset(&self) -> Result<(), Refused> {
        let _switch = self.switch.lock().await;
        let step = lock(&self.state).tour.running.take();
        if let Some(step) = step {
            step.abort();
            // To its end: it must not change anything later. It was aborted, so it ends with an error.
            drop(step.await);
        }
        let main = self.instance(None).await;
        let main = main.map_err(|error| Refused::Conflict(error.to_string()))?;
        main.set_load(true);
        let mut state = lock(&self.state);
        state.main = main;
        state.weak = None;
        state.tour = Tour::default();
        Ok(())
    }

    async fn instance(
        &self,
        weakness: Option<Weakness>,
    ) -> Result<Arc<Instance>, Box<dyn Error + Send + Sync>> {
        let number = {
            let mut state = lock(&self.state);
            state.next_instance += 1;
            state.next_instance - 1
        };
        Instance::start(self.events.feed(number), weakness, self.with_redis).await
    }
}

fn expect(shown: &Instance, node: usize, power: Power) -> Result<(), Refused> {
    let is = shown.board.power(known(node)?);
    if is == power {
        return Ok(());
    }
    Err(Refused::Conflict(format!("node {} is {is:?}", node + 1)))
}

fn known(node: usize) -> Result<usize, Refused> {
    if node < NODES {
        return Ok(node);
    }
    Err(Refused::Invalid(format!("there is no node {node}")))
}

fn number(names: &[&str], name: &str) -> Result<usize, Refused> {
    let number = names.iter().position(|known| *known == name);
    number.ok_or_else(|| Refused::Invalid(format!("there is no {name}")))
}

/// The longest delay of a node, in milliseconds.
const MAX_DELAY: u64 = 1_000;
