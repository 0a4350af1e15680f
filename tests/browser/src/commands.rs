//! Chromium's commands that are not part of the WebDriver standard.

use fantoccini::wd::WebDriverCompatibleCommand;
use http::Method;
use serde_json::{Value, json};
use url::{ParseError, Url};

/// A POST to a path below the session.
#[derive(Debug)]
pub(crate) struct Post {
    path: &'static str,
    body: Value,
}

impl Post {
    /// A command of the DevTools protocol.
    pub(crate) fn devtools(command: &str, parameters: &Value) -> Self {
        Self {
            path: "goog/cdp/execute",
            body: json!({"cmd": command, "params": parameters}),
        }
    }

    /// Takes what was logged since the last time: `browser` is the console.
    pub(crate) fn log(kind: &str) -> Self {
        Self {
            path: "se/log",
            body: json!({"type": kind}),
        }
    }
}

impl WebDriverCompatibleCommand for Post {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, ParseError> {
        let session = session.expect("the session has begun");
        base.join(&format!("session/{session}/{}", self.path))
    }

    fn method_and_body(&self, _: &Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.body.to_string()))
    }
}
