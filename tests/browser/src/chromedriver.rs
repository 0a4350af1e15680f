//! Chromium and its driver as child processes.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{self, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fantoccini::error::NewSessionError;
use fantoccini::{Client, ClientBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Map, json};
use support::{ChildProcess, not_run};

/// A driver with one browser, both of which end when this is dropped.
#[derive(Debug)]
pub(crate) struct Chromedriver {
    // Dropped before the folder is removed.
    process: Option<ChildProcess>,
    port: u16,
    session: Option<String>,
    profile: PathBuf,
}

impl Chromedriver {
    /// Starts a driver and a browser; `None`, and a line that says so, where they are not installed.
    pub(crate) async fn start() -> Option<(Self, Client)> {
        let program = env::var("CHROMEDRIVER").unwrap_or_else(|_| "chromedriver".to_owned());
        if Command::new(&program).arg("--version").output().is_err() {
            not_run("the pages in a browser, because chromedriver is missing");
            return None;
        }
        let process = ChildProcess::start(program, &["--port=0"], &[]);
        let line = process.wait_for_line("successfully on port ", START);
        let port = line
            .rsplit("successfully on port ")
            .next()
            .unwrap_or_default();
        let port = port
            .trim_end_matches('.')
            .parse()
            .expect("the line ends with a port");
        let mut driver = Self {
            process: Some(process),
            port,
            session: None,
            profile: new_folder(),
        };
        let client = match driver.open_browser().await {
            Ok(client) => client,
            // One of another version is as good as none.
            Err(NewSessionError::SessionNotCreated(error)) => {
                let why = error.to_string();
                not_run(&format!(
                    "the pages in a browser, because chromium does not start: {why}"
                ));
                return None;
            }
            Err(error) => panic!("chromedriver opens no session: {error}"),
        };
        driver.session = client.session_id().await.expect("the session is open");
        Some((driver, client))
    }

    async fn open_browser(&self) -> Result<Client, NewSessionError> {
        let profile = format!("--user-data-dir={}", self.profile.display());
        let arguments = [&ARGUMENTS[..], &[&profile]].concat();
        let mut capabilities = Map::new();
        capabilities.insert("goog:chromeOptions".into(), json!({"args": arguments}));
        capabilities.insert("goog:loggingPrefs".into(), json!({"browser": "ALL"}));
        ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&format!("http://127.0.0.1:{}", self.port))
            .await
    }

    /// Ends the browser, also in a test that panics: the driver alone would leave it behind.
    fn close_browser(&self, session: &str) -> std::io::Result<()> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(
            stream,
            "DELETE /session/{session} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = [0; 512];
        stream.read(&mut answer).map(drop)
    }
}

impl Drop for Chromedriver {
    fn drop(&mut self) {
        if let Some(session) = &self.session {
            self.close_browser(session).ok();
        }
        self.process = None;
        fs::remove_dir_all(&self.profile).ok();
    }
}

const START: Duration = Duration::from_secs(60);

/// An empty folder for what a browser keeps.
fn new_folder() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("tower-redlock-browser-{}-{count}", process::id());
    let folder = env::temp_dir().join(name);
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// The browser shows nothing, and asks for nothing but the page.
const ARGUMENTS: [&str; 10] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1280,1000",
];
