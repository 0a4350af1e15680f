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

/// A page that is shown by a browser of its own.
#[derive(Debug)]
pub struct Page {
    // Dropped in this order: the browser is closed before its page is gone.
    client: Client,
    _driver: Chromedriver,
    url: String,
    playground: Option<Playground>,
}

impl Page {
    /// Starts a playground with these arguments and opens its page; `None` where there is no browser.
    pub async fn open(arguments: &[&'static str]) -> Option<Self> {
        let mut page = Self::of(String::new()).await?;
        let playground = Playground::start(arguments, "127.0.0.1:0");
        page.url = format!("{}/", playground.url());
        page.playground = Some(playground);
        page.load().await;
        page.wait_for("the first state and the tour", LIVE).await;
        Some(page)
    }

    /// Opens a browser for the page with this URL, before the page is loaded; `None` where there is no browser.
    pub async fn of(url: String) -> Option<Self> {
        let (driver, client) = Chromedriver::start().await?;
        // Instead of the browser's own first page.
        let blank = client.goto("about:blank").await;
        blank.expect("an empty page is loaded");
        Some(Self {
            client,
            _driver: driver,
            url,
            playground: None,
        })
    }

    pub async fn load(&self) {
        let loaded = self.client.goto(&self.url).await;
        loaded.expect("the page is loaded");
    }

    /// Emulates a window of this height.
    pub async fn resize(&self, height: u32) {
        let metrics =
            json!({"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.devtools("Emulation.setDeviceMetricsOverride", &metrics)
            .await;
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

    /// Waits until there is an element.
    pub async fn see(&self, selector: &str) {
        self.see_within(selector, PATIENCE).await;
    }

    /// Waits for so long until there is an element.
    pub async fn see_within(&self, selector: &str, patience: Duration) {
        self.wait_longer_for(selector, &one(selector), patience)
            .await;
    }

    /// Waits until there are so many elements.
    pub async fn see_count(&self, selector: &str, count: usize) {
        let is_so = format!("{}.length === {count}", all(selector));
        self.wait_for(&is_so, &is_so).await;
    }

    /// Waits until an element has a text.
    pub async fn see_text(&self, selector: &str, text: &str) {
        let is_shown = format!("{}?.textContent === {}", one(selector), json!(text));
        self.wait_for(&is_shown, &is_shown).await;
    }

    /// Waits until an element has a text that matches a regular expression.
    pub async fn see_match(&self, selector: &str, pattern: &str) {
        let is_shown = format!("/{pattern}/.test({}?.textContent)", one(selector));
        self.wait_for(&is_shown, &is_shown).await;
    }

    /// Returns how many elements there are.
    pub async fn count(&self, selector: &str) -> u64 {
        let script = format!("return {}.length", all(selector));
        let count = self.run(&script).await;
        count.as_u64().expect("a length is a number")
    }

    /// Returns the text of an element.
    pub async fn text(&self, selector: &str) -> String {
        let script = format!("return {}.textContent", one(selector));
        let text = self.run(&script).await;
        text.as_str().expect("an element has a text").to_owned()
    }

    async fn wait_longer_for(&self, what: &str, expression: &str, patience: Duration) {
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

    /// Lets the callers of the playground send requests.
    pub async fn turn_load_on(&self) {
        self.run("document.querySelector('#load[aria-pressed=false]')?.click()")
            .await;
        self.see("#load[aria-pressed=true]").await;
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
        self.tab_to(selector).await;
        self.type_keys(" ").await;
    }

    /// Presses Tab until the element has the focus.
    pub async fn tab_to(&self, selector: &str) {
        let has_focus = format!("return document.activeElement.matches('{selector}')");
        let tab = char::from(Key::Tab).to_string();
        for _ in 0..MOST_TABS {
            if self.run(&has_focus).await == Value::Bool(true) {
                return;
            }
            self.type_keys(&tab).await;
        }
        panic!("{selector} does not get the focus by {MOST_TABS} presses of Tab");
    }

    /// Types into the element that has the focus.
    pub async fn type_keys(&self, keys: &str) {
        let active = self
            .client
            .active_element()
            .await
            .expect("an element has the focus");
        active.send_keys(keys).await.expect("it takes keys");
    }

    /// Checks that the console has no warnings and errors.
    pub async fn check_console(&self) {
        let entries = self.client.issue_cmd(Post::log("browser")).await;
        let entries = entries.expect("the driver has the log");
        let entries = entries.as_array().expect("a log is a list");
        let is_problem = |entry: &&Value| entry["level"] == "SEVERE" || entry["level"] == "WARNING";
        let problems: Vec<&Value> = entries.iter().filter(is_problem).collect();
        assert!(problems.is_empty(), "{problems:#?}");
    }

    /// Returns the playground under the page.
    pub fn playground(&mut self) -> &mut Playground {
        self.playground.as_mut().expect("it is the page of one")
    }

    /// Returns a picture of the window as a PNG.
    pub async fn picture(&self) -> Vec<u8> {
        let captured = self.devtools("Page.captureScreenshot", &json!({})).await;
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

/// The expression for the first element.
fn one(selector: &str) -> String {
    format!("document.querySelector({})", json!(selector))
}

/// The expression for all elements.
fn all(selector: &str) -> String {
    format!("document.querySelectorAll({})", json!(selector))
}

/// What the page shows while it gets the server's states.
const LIVE: &str = "document.body.dataset.connection === 'live' && document.body.dataset.instance \
     && document.querySelectorAll('#tour > li').length === 8";

const MOST_TABS: usize = 120;
