//! The example as a child process.

use std::time::Duration;

use support::{ChildProcess, example_path};

const START: Duration = Duration::from_secs(60);

/// A running playground.
#[derive(Debug)]
pub struct Playground {
    process: Option<ChildProcess>,
    url: String,
    arguments: Vec<&'static str>,
}

impl Playground {
    pub(crate) fn start(arguments: &[&'static str], listen: &str) -> Self {
        let program = example_path("playground");
        let process = ChildProcess::start(program, arguments, &[("LISTEN", listen)]);
        let line = process.wait_for_line("Open http://", START);
        let mut words = line.split_whitespace();
        let url = words.find(|word| word.starts_with("http://"));
        let url = url.expect("the line has a URL").trim_end_matches('/');
        Self {
            process: Some(process),
            url: url.to_owned(),
            arguments: arguments.to_vec(),
        }
    }

    /// The page's URL, without a slash at the end.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Ends the playground under the page.
    pub fn end(&mut self) {
        self.process = None;
    }

    /// Starts a playground that was ended again at the same address.
    pub fn restart(&mut self) {
        let listen = self.url.trim_start_matches("http://").to_owned();
        *self = Self::start(&self.arguments, &listen);
    }
}
