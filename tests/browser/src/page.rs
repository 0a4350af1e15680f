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
        let page = Self::blank(arguments).await?;
        page.emulate(Size::DESKTOP, Scheme::Light, false).await;
        page.visit().await;
        Some(page)
    }

    /// Like [`Page::open`], before the page is loaded.
    pub async fn blank(arguments: &[&'static str]) -> Option<Self> {
        let mut page = Self::of(String::new()).await?;
        let playground = Playground::start(arguments, "127.0.0.1:0");
        page.url = format!("{}/", playground.url());
        page.playground = Some(playground);
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

    /// Loads the playground and waits until it shows the first state and the tour.
    pub async fn visit(&self) {
        self.load().await;
        self.wait_for("the first state", LIVE).await;
    }

    /// Where the page comes from.
    pub fn url(&self) -> &str {
        &self.url
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

    /// Waits until there is an element.
    pub async fn see(&self, selector: &str) {
        let found = format!("document.querySelector({})", json!(selector));
        self.wait_for(selector, &found).await;
    }

    /// Waits until there are so many elements.
    pub async fn see_count(&self, selector: &str, count: usize) {
        let all = format!("document.querySelectorAll({})", json!(selector));
        let what = format!("{count} of {selector}");
        self.wait_for(&what, &format!("{all}.length === {count}"))
            .await;
    }

    /// Waits until an element has a text.
    pub async fn see_text(&self, selector: &str, text: &str) {
        let shown = format!("document.querySelector({})?.textContent", json!(selector));
        let is_shown = format!("{shown} === {}", json!(text));
        self.wait_for(&format!("{text:?} in {selector}"), &is_shown)
            .await;
    }

    /// Waits until an element has a text that matches a regular expression.
    pub async fn see_match(&self, selector: &str, pattern: &str) {
        let shown = format!("document.querySelector({})?.textContent", json!(selector));
        let is_shown = format!("/{pattern}/.test({shown})");
        self.wait_for(&format!("{pattern} in {selector}"), &is_shown)
            .await;
    }

    /// Returns the text of an element.
    pub async fn text(&self, selector: &str) -> String {
        let element = format!("document.querySelector({})", json!(selector));
        let text = self.run(&format!("return {element}.textContent")).await;
        text.as_str().expect("an element has a text").to_owned()
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

    /// Returns the playground under the page.
    pub fn playground(&mut self) -> &mut Playground {
        self.playground.as_mut().expect("it is the page of one")
    }

    /// Checks that nothing stands out of the window.
    pub async fn check_width(&self) {
        assert_eq!(self.run(OUTSIDE).await, json!([]));
    }

    /// Checks the contrast of all texts, and returns their number.
    pub async fn check_contrast(&self) -> u64 {
        let checked = self.run(CONTRAST).await;
        assert_eq!(checked["below"], json!([]));
        checked["checked"].as_u64().expect("it is a number")
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

/// Elements that stand out of the window.
const OUTSIDE: &str = "
const { scrollWidth } = document.documentElement;
if (scrollWidth > innerWidth) return [`the page is ${scrollWidth} wide`];
return [...document.querySelectorAll('body *')]
    .filter(e => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 0.5)
    .filter(e => !e.closest('svg') && !e.closest('.unseen'))
    .map(e => e.outerHTML.slice(0, 120));
";

/// The contrast of each text with what is behind it: WCAG's formula, at least 4.5.
const CONTRAST: &str = "
const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const rgba = colour => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const backdrop = e => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.unshift(rgba(getComputedStyle(at).backgroundColor));
    return layers.reduce((below, top) => over(top, below), [255, 255, 255, 1]);
};
const opacity = e => { let all = 1; for (let at = e; at; at = at.parentElement) all *= getComputedStyle(at).opacity; return all; };
const light = colour => {
    const [r, g, b] = colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const below = [];
let checked = 0;
for (const e of document.querySelectorAll('body *')) {
    const text = [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
    if (!text || !e.getClientRects().length || e.closest('.unseen, script, noscript, title')) continue;
    const style = getComputedStyle(e);
    const behind = backdrop(e);
    const ink = rgba(e.ownerSVGElement ? style.fill : style.color);
    ink[3] *= opacity(e);
    const [one, other] = [light(over(ink, behind)), light(behind)].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    checked += 1;
    if (ratio < 4.5) below.push(`${ratio.toFixed(2)} ${text.slice(0, 40)} <${e.className.baseVal ?? e.className}>`);
}
return { checked, below };
";
