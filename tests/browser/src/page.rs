//! The page in a browser.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fantoccini::Client;
use fantoccini::key::Key;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::chromedriver::Chromedriver;
use crate::commands::Post;
use crate::playground::Playground;

/// How long a change may take to be seen on the page.
const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(50);

/// The colours that the system asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Light,
    Dark,
}

/// The window, in CSS pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub width: u32,
    pub height: u32,
}

impl Size {
    pub const DESKTOP: Self = Self {
        width: 1280,
        height: 900,
    };
    pub const PHONE: Self = Self {
        width: 390,
        height: 844,
    };
}

/// A playground of its own, shown by a browser of its own.
#[derive(Debug)]
pub struct Page {
    // Dropped in this order: the browser is closed before its page is gone.
    client: Client,
    _driver: Chromedriver,
    playground: Playground,
    arguments: Vec<&'static str>,
}

impl Page {
    /// Starts a playground with these arguments and opens its page; `None` where there is no browser.
    pub async fn open(arguments: &[&'static str]) -> Option<Self> {
        let page = Self::blank(arguments).await?;
        page.emulate(Size::DESKTOP, Scheme::Light, false).await;
        page.visit().await;
        Some(page)
    }

    /// Like [`Page::open`], before the page is loaded.
    pub async fn blank(arguments: &[&'static str]) -> Option<Self> {
        let (driver, client) = Chromedriver::start().await?;
        // Instead of the browser's own first page.
        let blank = client.goto("about:blank").await;
        blank.expect("an empty page is loaded");
        Some(Self {
            client,
            _driver: driver,
            playground: Playground::start(arguments, "127.0.0.1:0"),
            arguments: arguments.to_vec(),
        })
    }

    /// Loads the page and waits until it shows the first state and the tour.
    pub async fn visit(&self) {
        let loaded = self.client.goto(&self.origin()).await;
        loaded.expect("the page is loaded");
        self.wait_for("the first state", LIVE).await;
    }

    /// Where the page comes from.
    pub fn origin(&self) -> String {
        format!("{}/", self.playground.url())
    }

    /// Emulates a window, the system's colours, and the wish for less motion.
    pub async fn emulate(&self, size: Size, scheme: Scheme, reduced_motion: bool) {
        let metrics = json!({
            "width": size.width, "height": size.height, "deviceScaleFactor": 1, "mobile": false,
        });
        self.devtools("Emulation.setDeviceMetricsOverride", &metrics)
            .await;
        let scheme = if scheme == Scheme::Dark {
            "dark"
        } else {
            "light"
        };
        let motion = if reduced_motion {
            "reduce"
        } else {
            "no-preference"
        };
        let features = json!({"features": [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]});
        self.devtools("Emulation.setEmulatedMedia", &features).await;
    }

    /// Runs the body of a function in the page and returns its result.
    pub async fn run(&self, script: &str) -> Value {
        let result = self.client.execute(script, Vec::new()).await;
        result.unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Waits until an expression is true in the page.
    pub async fn wait_for(&self, what: &str, expression: &str) {
        self.wait_longer_for(what, expression, PATIENCE).await;
    }

    pub async fn wait_longer_for(&self, what: &str, expression: &str, patience: Duration) {
        let deadline = Instant::now() + patience;
        let script = format!("return Boolean({expression})");
        while self.run(&script).await != Value::Bool(true) {
            if Instant::now() > deadline {
                let text = self.run("return document.body.innerText").await;
                let text = text.as_str().unwrap_or_default();
                panic!("not seen within {patience:?}: {what}; the page shows\n{text}");
            }
            sleep(POLL).await;
        }
    }

    /// Clicks the element that a CSS selector names.
    pub async fn click(&self, selector: &str) {
        let found = self.client.find(fantoccini::Locator::Css(selector)).await;
        let element = found.unwrap_or_else(|error| panic!("{selector}: {error}"));
        let clicked = element.click().await;
        clicked.unwrap_or_else(|error| panic!("{selector}: {error}"));
    }

    /// Presses Tab until the element has the focus, and then the space bar.
    pub async fn press_by_keyboard(&self, selector: &str) {
        let has_focus = format!("return document.activeElement.matches('{selector}')");
        let tab = char::from(Key::Tab).to_string();
        for _ in 0..MOST_TABS {
            if self.run(&has_focus).await == Value::Bool(true) {
                self.type_keys(" ").await;
                return;
            }
            self.type_keys(&tab).await;
        }
        panic!("{selector} does not get the focus by {MOST_TABS} presses of Tab");
    }

    async fn type_keys(&self, keys: &str) {
        let active = self
            .client
            .active_element()
            .await
            .expect("an element has the focus");
        active.send_keys(keys).await.expect("it takes keys");
    }

    /// Returns the warnings and errors of the console since the last call.
    pub async fn console_problems(&self) -> Vec<String> {
        let entries = self.log("browser").await;
        let problems = entries
            .iter()
            .filter(|entry| entry["level"] == "SEVERE" || entry["level"] == "WARNING");
        problems.map(Value::to_string).collect()
    }

    /// Returns the URLs of the requests since the last call.
    pub async fn requests(&self) -> Vec<String> {
        let mut urls = Vec::new();
        for entry in self.log("performance").await {
            let message = entry["message"].as_str().expect("the message is a text");
            let message: Value = serde_json::from_str(message).expect("the text is JSON");
            let event = &message["message"];
            if event["method"] == "Network.requestWillBeSent" {
                let url = event["params"]["request"]["url"].as_str();
                urls.push(url.expect("a request has a URL").to_owned());
            }
        }
        urls
    }

    async fn log(&self, kind: &str) -> Vec<Value> {
        let entries = self.client.issue_cmd(Post::log(kind)).await;
        let entries = entries.unwrap_or_else(|error| panic!("log {kind}: {error}"));
        entries.as_array().expect("a log is a list").clone()
    }

    /// Ends the playground under the page.
    pub fn end_playground(&mut self) {
        self.playground.end();
    }

    /// Starts the playground again at its old address.
    pub fn restart_playground(&mut self) {
        self.playground.restart(&self.arguments);
    }

    /// Returns a picture of the whole page as a PNG.
    pub async fn picture(&self) -> Vec<u8> {
        let height = self
            .run("return document.documentElement.scrollHeight")
            .await;
        let width = self.run("return innerWidth").await;
        let clip = json!({"x": 0, "y": 0, "width": width, "height": height, "scale": 1});
        self.capture(&json!({"captureBeyondViewport": true, "clip": clip}))
            .await
    }

    /// Returns a picture of the window as a PNG.
    pub async fn picture_of_window(&self) -> Vec<u8> {
        self.capture(&json!({})).await
    }

    async fn capture(&self, parameters: &Value) -> Vec<u8> {
        let captured = self.devtools("Page.captureScreenshot", parameters).await;
        let data = captured["data"].as_str().expect("a picture is a text");
        STANDARD.decode(data).expect("the text is base64")
    }

    async fn devtools(&self, command: &str, parameters: &Value) -> Value {
        let answer = self
            .client
            .issue_cmd(Post::devtools(command, parameters))
            .await;
        answer.unwrap_or_else(|error| panic!("{command}: {error}"))
    }
}

/// What the page shows while it gets the server's states.
const LIVE: &str = "document.body.dataset.connection === 'live' && document.body.dataset.instance \
     && document.querySelectorAll('#tour > li').length === 8";

const MOST_TABS: usize = 120;
