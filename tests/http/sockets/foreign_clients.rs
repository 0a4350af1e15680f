//! Hostile and odd HTTP through all layers: from curl, nghttp and h2load, and as bytes where no client sends it.
//!
//! However a request is framed, the handler gets it only under the lock of its resource, no lock is left, and the server
//! serves the next request.

use std::collections::HashSet;
use std::future::pending;
use std::io;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{FromRef, Path, State};
use axum::http::Method;
use axum::response::IntoResponse;
use axum::routing::any;
use bytes::Bytes;
use serde::Deserialize;
use support::{http, ms, not_run, once};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::{sleep, timeout};
use tower_redlock::test_util::ScriptedNodes;
use tower_redlock::{
    BufferBodyLayer, LockKey, LockKeys, LockResource, Locked, Redlock, RedlockLayer, key,
};

use crate::sockets::server::{PATIENCE, Server};

/// What becomes of the requests of a row, each as the handler got it: method, resource, and length of the body.
///
/// What RFC 9112 lets a server take or refuse, and what a later hyper may refuse, is `Either`.
#[derive(Debug, Clone, Copy)]
enum Outcome {
    /// The handler gets exactly these, and each is answered.
    Served(&'static str),
    /// The handler gets none, and none is answered with success.
    Refused,
    Either(&'static str),
    /// The handler gets these, and the client leaves without waiting for an answer.
    Left(&'static str),
    /// Any number reaches the handler.
    Any,
}

use Outcome::{Any, Either, Left, Refused, Served};

/// The arguments.
const CURL: Table = &[
    ("-d|x|{url}/a", Served("POST a 1")),
    ("-d|x|{url}/a|{url}/b", Served("POST a 1, POST b 1")),
    ("-I|{url}/a", Served("HEAD a 0")),
    ("-X|OPTIONS|-d|x|{url}/a", Served("OPTIONS a 1")),
    ("-X|TRACE|-d|x|{url}/a", Served("TRACE a 1")),
    // Another method than GET, so it is locked.
    ("-X|get|-d|x|{url}/a", Served("get a 1")),
    ("-X|CONNECT|{url}/a", Either("CONNECT a 0")),
    (
        "-d|x|--request-target|http://other/{route}/a|{url}/b",
        Served("POST a 1"),
    ),
    // Framing.
    (
        "-d|xyz|-H|Content-Length: 1|-H|Transfer-Encoding: chunked|{url}/a",
        Either("POST a 3"),
    ),
    (
        "-d|x|-H|Transfer-Encoding: chunked|{url}/a",
        Served("POST a 1"),
    ),
    ("-d|x|-H|X-A: a\r\n Host: b|{url}/a", Either("POST a 1")),
    ("-d|x|-H|Expect: 100-continue|{url}/a", Served("POST a 1")),
    (
        "-X|GET|-d|DELETE / HTTP/1.1\r\n\r\n|{url}/a",
        Served("GET a 21"),
    ),
    // Keys.
    (
        "-d|x|{url}/a%0D%0AContent-Length:%200%0D%0A%0D%0APOST%20/b",
        Either("POST a\r\nContent-Length: 0\r\n\r\nPOST /b 1"),
    ),
    ("-d|x|{url}/a%00%2Fb%2e%2e", Served("POST a\0/b.. 1")),
    ("-d|x|{url}/{long}", Served("POST {long} 1")),
    ("-d|x|-H|Idempotency-Key: k|{url}/a", Served("POST a 1")),
    ("-d|x|--max-time|1|{url}/slow", Left("POST slow 1")),
    // HTTP/2; the first asks for an upgrade, and the connection stays at HTTP/1.1.
    ("--http2|-d|x|{url}/a", Served("POST a 1")),
    ("{h2}|-d|x|{url}/a", Served("POST a 1")),
    ("{h2}|-d|x|{url}/{long}", Either("POST {long} 1")),
    ("{h2}|-d|x|--max-time|1|{url}/slow", Left("POST slow 1")),
];

/// Those of which the handler gets no request.
const CURL_REFUSED: &[&str] = &[
    "-X|CONNECT|--request-target|a:80|{url}/a",
    "-X|POST|--request-target|a:80|{url}/a",
    "-X|POST|--request-target|*|{url}/a",
    "-d|xyz|-H|Content-Length: 3|-H|Content-Length: 1|{url}/a",
    "-d|{big}|{url}/a",
    "-d|x|{url}/%FF",
    "-d|x|{url}/",
    "-d|x|{url}/{big}",
    "-d|x|-H|Idempotency-Key: k|-H|Idempotency-Key: k|{url}/a",
    "-d|x|-H|Idempotency-Key: k|-H|Idempotency_Key: l|{url}/a",
    "-d|x|-H|Idempotency-Key: {long}|{url}/a",
    "{h2}|-d|x|-H|Idempotency-Key: k|-H|Idempotency-Key: l|{url}/a",
    "{h2}|-d|xyz|-H|Content-Length: 1|{url}/a",
];

/// The arguments; `{file}` has `{size}` bytes.
const NGHTTP: Table = &[
    ("-d|{file}|{url}/a", Served("POST a {size}")),
    (
        "--expect-continue|-d|{file}|{url}/a",
        Served("POST a {size}"),
    ),
    ("-H|:method: HEAD|{url}/a", Served("HEAD a 0")),
    ("-H|:method: post|{url}/a", Served("post a 0")),
    (
        "--trailer|idempotency-key: k|--trailer|host: b|-d|{file}|{url}/a",
        Either("POST a {size}"),
    ),
    // A window of one byte, and of none.
    ("-w|1|-d|{file}|{url}/a", Served("POST a {size}")),
    ("-w|0|-t|1|-d|{file}|{url}/a", Left("POST a {size}")),
    ("-t|1|-d|{file}|{url}/slow", Left("POST slow {size}")),
    ("-m|50|-d|{file}|{url}/a", Any),
    ("-m|50|-d|{file}|{url}/a|{url}/b|{url}/c", Any),
    // An upgrade from HTTP/1.1, which the server answers in HTTP/1.1.
    ("-u|{url}/a", Left("GET a 0")),
];

/// As for curl.
const NGHTTP_REFUSED: &[&str] = &[
    "-H|content-length: 3|-d|{file}|{url}/a",
    "-H|idempotency-key: k|-H|idempotency-key: l|-d|{file}|{url}/a",
];

/// The bytes. Each row ends its connection with its last request, unless the client leaves.
const HTTP1: Table = &[
    // By its length, the first request would end within the second. Such a connection must be closed (RFC 9112, section 6.1).
    (
        "{post}content-length: 9\r\n{chunked}0\r\n\r\n{post}{close}content-length: 1\r\n\r\nx",
        Either("POST a 0"),
    ),
    // Chunks.
    (
        "{post}{close}{chunked}1;a=\"b\";c\r\nx\r\n0;d\r\n\r\n",
        Either("POST a 1"),
    ),
    (
        "{post}{close}{chunked}1\r\nx\r\n0\r\nidempotency-key: k\r\ncontent-length: 9\r\n\r\n",
        Either("POST a 1"),
    ),
    // Heads.
    (
        "{post}{close}x-a: a\r\n\tb\r\ncontent-length: 0\r\n\r\n",
        Either("POST a 0"),
    ),
    // A request in the body of another, and behind it.
    (
        "{post}{close}content-length: 31\r\n\r\nDELETE /a HTTP/1.1\r\nhost: a\r\n\r\n",
        Served("POST a 31"),
    ),
    (
        "{post}content-length: 0\r\n\r\n{post}{close}content-length: 1\r\n\r\nx",
        Served("POST a 0, POST a 1"),
    ),
    (
        "GET /{route}/a HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n{post}{close}\r\n",
        Served("GET a 0, POST a 0"),
    ),
    // HTTP/2 behind a request that asks for it.
    (
        "{post}connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\
         content-length: 1\r\n\r\nxPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        Served("POST a 1"),
    ),
    // The client leaves.
    ("{post}cont", Left("")),
    ("{post}content-length: 5\r\n\r\nx", Left("")),
    ("{post}{chunked}5\r\nx", Left("")),
    (
        "{post}expect: 100-continue\r\ncontent-length: 5\r\n\r\n",
        Left(""),
    ),
    (
        "POST /{route}/slow HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx",
        Left("POST slow 1"),
    ),
];

/// Lengths, chunks and heads that no server may take.
const HTTP1_REFUSED: &[&str] = &[
    "{post}{close}content-length: 1, 5\r\n\r\nx",
    "{post}{close}content-length: +1\r\n\r\nx",
    "{post}{close}content-length: -1\r\n\r\nx",
    "{post}{close}content-length: 99999999999999999999\r\n\r\nx",
    "{post}{close}transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "{post}{close}transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "{post}{close}transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "{post}{close}{chunked}g\r\nx\r\n0\r\n\r\n",
    "{post}{close}{chunked}fffffffffffffffff\r\nx\r\n0\r\n\r\n",
    "{post}{close}{chunked}2\r\nxyz\r\n0\r\n\r\n",
    "{post}{close}x-a: a\0b\r\ncontent-length: 0\r\n\r\n",
    "{post}{close}x-a: a\rb: c\r\ncontent-length: 0\r\n\r\n",
    "POST /{route}/a\0b HTTP/1.1\r\nhost: a\r\n{close}\r\n",
    "POST /{route}/a HTTP/1.1 {post}{close}content-length: 0\r\n\r\n",
    "POST /{route}/a\r\n\r\n",
];

/// Frames of HTTP/2, with `POST` requests for `a` on stream 1.
fn http2(route: &str) -> Vec<(&'static str, Vec<u8>, Outcome)> {
    let post = |stream, flags, name: &str, more: &[(&str, &str)]| {
        let path = format!("/{route}/{name}");
        let head = [(":method", "POST"), (":scheme", "http"), (":path", &path)];
        frame(HEADERS, flags, stream, &fields(&[&head, more].concat()))
    };
    let upload = |more: &[(&str, &str)], data: &[u8]| {
        let data = frame(DATA, END_STREAM, 1, data);
        [post(1, END_HEADERS, "a", more), data].concat()
    };
    let trailers = |trailers: &[(&str, &str)]| {
        let (head, data) = (post(1, END_HEADERS, "a", &[]), frame(DATA, 0, 1, b"x"));
        let trailers = frame(HEADERS, END_HEADERS | END_STREAM, 1, &fields(trailers));
        [head, data, trailers].concat()
    };
    let behind = |flags, frame: &[u8]| [post(1, flags, "a", &[]), frame.repeat(20_000)].concat();
    let odd = |count: u32| (0..count).map(|number| 2 * number + 1);
    let reset = odd(2_000).flat_map(|stream| {
        let name = format!("slow{stream}");
        let begun = post(stream, END_HEADERS | END_STREAM, &name, &[]);
        [begun, frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
    });
    let many = odd(1_000).flat_map(|stream| {
        let name = (stream % 7).to_string();
        post(stream, END_HEADERS | END_STREAM, &name, &[])
    });
    let continued = frame(CONTINUATION, 0, 1, &fields(&[("x", "y")]));
    let cut = post(1, END_HEADERS | END_STREAM, "a HTTP/1.1", &[]);
    let empty = frame(DATA, 0, 1, b"");
    let late = [("idempotency-key", "k"), ("content-length", "9")];
    let other = [(":path", "/b")];
    let path = format!("/{route}/a");
    let mut rows = vec![
        ("one request", upload(&[], b"x"), Served("POST a 1")),
        ("trailers", trailers(&late), Either("POST a 1")),
        ("path in trailers", trailers(&other), Either("POST a 1")),
        ("space in a path", cut, Refused),
        ("rapid reset", reset.collect(), Any),
        ("many streams", many.collect(), Any),
        ("continuations", behind(END_STREAM, &continued), Refused),
        ("empty data", behind(END_HEADERS, &empty), Refused),
        ("settings", frame(SETTINGS, 0, 0, b"").repeat(20_000), Any),
        ("pings", frame(PING, 0, 0, &[0; 8]).repeat(20_000), Any),
    ];
    let malformed: [(_, &[(&str, &str)]); 9] = [
        (
            "two keys",
            &[("idempotency-key", "k"), ("idempotency-key", "l")],
        ),
        ("two paths", &other),
        ("line break in a value", &[("x", "a\r\nhost: b")]),
        ("NUL in a value", &[("x", "a\0")]),
        ("upper case", &[("X-A", "a")]),
        ("chunked", &[("transfer-encoding", "chunked")]),
        ("too much data", &[("content-length", "1")]),
        ("too little data", &[("content-length", "5")]),
        (
            "two lengths",
            &[("content-length", "1"), ("content-length", "3")],
        ),
    ];
    rows.extend(malformed.map(|(name, more)| (name, upload(more, b"xyz"), Refused)));
    // RFC 9113, sections 4 to 6: errors of the connection, amid an upload.
    let most = [0x7f, 0xff, 0xff, 0xff];
    let broken = [
        (
            "window grows by nothing",
            frame(WINDOW_UPDATE, 0, 1, &[0; 4]),
        ),
        (
            "window overflows",
            frame(WINDOW_UPDATE, 0, 0, &most).repeat(2),
        ),
        ("data on an idle stream", frame(DATA, END_STREAM, 3, b"x")),
        (
            "reset of an idle stream",
            frame(RST_STREAM, 0, 3, &[0, 0, 0, 8]),
        ),
        ("even stream", post(2, END_HEADERS | END_STREAM, "a", &[])),
        (
            "padding alone",
            frame(DATA, PADDED | END_STREAM, 1, b"\x09x"),
        ),
        ("large frame", frame(DATA, END_STREAM, 1, &[b'x'; 16_385])),
        ("settings cut short", frame(SETTINGS, 0, 0, &[0; 5])),
        (
            "promise",
            frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2]),
        ),
        (
            "index without a field",
            frame(HEADERS, END_HEADERS, 3, &most[1..]),
        ),
        ("data amid a head", [post(3, 0, "a", &[]), empty].concat()),
    ];
    let amid = |frames: Vec<u8>| [post(1, END_HEADERS, "a", &[]), frames].concat();
    rows.extend(broken.map(|(name, frames)| (name, amid(frames), Refused)));
    // Section 8.3: errors of the request.
    let (method, scheme, path) = ((":method", "POST"), (":scheme", "http"), (":path", &*path));
    let requests: [(_, &[(&str, &str)]); 3] = [
        ("method behind a field", &[scheme, path, ("x", "y"), method]),
        ("no path", &[method, scheme]),
        ("no method", &[scheme, path]),
    ];
    let whole = |head| frame(HEADERS, END_HEADERS | END_STREAM, 1, &fields(head));
    rows.extend(requests.map(|(name, head)| (name, whole(head), Refused)));
    rows
}

#[tokio::test]
async fn curl_reaches_no_handler_without_its_lock() {
    let common = ["-sS", "-i", "--http1.1", "--path-as-is", "--max-time", "20"];
    run_table("curl", &common, CURL, CURL_REFUSED).await;
}

#[tokio::test]
async fn nghttp_reaches_no_handler_without_its_lock() {
    let common = ["-n", "-v", "--no-dep", "-t", "20"];
    run_table("nghttp", &common, NGHTTP, NGHTTP_REFUSED).await;
}

#[tokio::test]
async fn h2load_reaches_no_handler_without_its_lock() {
    for route in ROUTES {
        let target = Target::start(route).await;
        let args = "-n|300|-c|3|-m|100|-d|{file}|{url}/a|{url}/b";
        let Some(said) = target.run("h2load", &[], args).await else {
            return;
        };
        assert!(said.contains("300 done"), "{said}");
        let codes = said.lines().find(|line| line.starts_with("status codes:"));
        let codes: Vec<usize> = codes
            .unwrap_or_else(|| panic!("{said}"))
            .split_ascii_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let handled = target.handled(args).len();
        assert!(handled > 0, "{said}");
        assert_eq!(codes, [handled, 0, 300 - handled, 0], "{said}");
        target.check(args, 0, Any).await;
        target.server.ends_clean().await;
    }
}

#[tokio::test]
async fn bytes_of_http1_reach_no_handler_without_its_lock() {
    for route in ROUTES {
        let target = Target::start(route).await;
        for (bytes, outcome) in rows(HTTP1, HTTP1_REFUSED) {
            let said = target.send(target.fill(bytes).as_bytes(), outcome).await;
            let answered = successes(&String::from_utf8_lossy(&said));
            target.check(bytes, answered, outcome).await;
        }
        target.server.ends_clean().await;
    }
}

#[tokio::test]
async fn frames_of_http2_reach_no_handler_without_its_lock() {
    for route in ROUTES {
        let target = Target::start(route).await;
        for (name, frames, outcome) in http2(route) {
            let begin = [PREFACE, &frame(SETTINGS, 0, 0, b"")].concat();
            // The server ends the connection with the last stream.
            let end = frame(GOAWAY, 0, 0, &[0; 8]);
            let said = target.send(&[begin, frames, end].concat(), outcome).await;
            // The head of a response on the first stream, which begins with the status 200.
            let ok = [HEADERS, END_HEADERS, 0, 0, 0, 1, 0x88];
            let answered = said.windows(ok.len()).any(|part| part == ok);
            target.check(name, usize::from(answered), outcome).await;
        }
        target.server.ends_clean().await;
    }
}

async fn run_table(program: &str, common: &[&str], table: Table, refused: &'static [&str]) {
    for route in ROUTES {
        let target = Target::start(route).await;
        for (args, outcome) in rows(table, refused) {
            let before = target.server.connections();
            let Some(said) = target.run(program, common, args).await else {
                return;
            };
            // One that does not know an option sends nothing, and nothing would be wrong.
            let connections = target.server.connections();
            assert!(connections > before, "{program} {args}: {said}");
            target.check(args, successes(&said), outcome).await;
        }
        target.server.ends_clean().await;
    }
}

/// Requests with what becomes of them.
type Table = &'static [(&'static str, Outcome)];

/// Returns the rows of a table, and those of which the handler gets no request.
fn rows(table: Table, refused: &'static [&str]) -> impl Iterator<Item = (&'static str, Outcome)> {
    let refused = refused.iter().map(|row| (*row, Refused));
    table.iter().copied().chain(refused)
}

/// The layer, which lets safe methods pass, and the extractor, which does not.
const ROUTES: [&str; 2] = ["layer", "extractor"];

#[derive(Clone, FromRef)]
struct App {
    redlock: Redlock,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    handled: Vec<String>,
    /// The resources whose handlers are at work.
    inside: HashSet<String>,
    /// What must not have happened.
    wrong: Vec<String>,
}

#[derive(Deserialize)]
struct Thing(String);

impl LockResource for Thing {
    fn lock_keys(&self) -> LockKeys {
        LockKey::from(("thing", &*self.0)).into()
    }
}

/// Takes the resource from those at work, also when the handler is dropped.
struct Inside(Arc<Mutex<Seen>>, String);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.lock().unwrap().inside.remove(&self.1);
    }
}

impl App {
    async fn handle(self, method: Method, thing: Thing, body: Bytes, must_lock: bool) -> String {
        let got = format!("{method} {} {}", thing.0, body.len());
        let _inside = must_lock.then(|| {
            let mut seen = self.seen.lock().unwrap();
            let mut held = self.redlock.held().into_iter();
            if !held.any(|lock| lock.keys == thing.lock_keys()) {
                seen.wrong.push(format!("unlocked: {got}"));
            }
            if !seen.inside.insert(thing.0.clone()) {
                seen.wrong.push(format!("two at a time: {got}"));
            }
            Inside(Arc::clone(&self.seen), thing.0.clone())
        });
        self.seen.lock().unwrap().handled.push(got);
        if thing.0.starts_with("slow") {
            pending::<()>().await;
        }
        "handled\n".into()
    }
}

fn router(redlock: &Redlock, seen: &Arc<Mutex<Seen>>) -> Router {
    let locked = RedlockLayer::new(redlock.clone(), ("thing", key::path("name")));
    let by_layer =
        async |State(app): State<App>, method: Method, Path(thing): Path<Thing>, body: Bytes| {
            let must_lock = !method.is_safe();
            app.handle(method, thing, body, must_lock).await
        };
    let by_extractor = async |State(app): State<App>,
                              method: Method,
                              Locked(guard, Path(thing)): Locked<Path<Thing>>,
                              body: Bytes| {
        let response = app.handle(method, thing, body, true).await;
        guard.hold_until_sent(response.into_response())
    };
    Router::new()
        .route("/layer/{name}", any(by_layer).layer(locked))
        .route("/extractor/{name}", any(by_extractor))
        .layer(once(redlock))
        .layer(BufferBodyLayer::new(BODY_LIMIT))
        .with_state(App {
            redlock: redlock.clone(),
            seen: Arc::clone(seen),
        })
}

/// A server with all layers, and what its handler saw since the last row.
struct Target {
    route: &'static str,
    server: Server,
    seen: Arc<Mutex<Seen>>,
}

impl Target {
    async fn start(route: &'static str) -> Self {
        let seen = Arc::default();
        let server = Server::serve(&ScriptedNodes::new(3), |redlock| router(redlock, &seen)).await;
        Self {
            route,
            server,
            seen,
        }
    }

    /// Replaces what stands in braces.
    fn fill(&self, row: &str) -> String {
        row.replace("{post}", "POST /{route}/a HTTP/1.1\r\nhost: a\r\n")
            .replace("{close}", "connection: close\r\n")
            .replace("{chunked}", "transfer-encoding: chunked\r\n\r\n")
            .replace("{url}", &format!("http://{}/{{route}}", self.server.addr))
            .replace("{h2}", "--http2-prior-knowledge")
            .replace("{route}", self.route)
            .replace("{long}", &"k".repeat(10_000))
            .replace("{big}", &"k".repeat(BODY_LIMIT + 1))
            .replace("{file}", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
            .replace(
                "{size}",
                &include_str!("../../Cargo.toml").len().to_string(),
            )
    }

    /// Runs a client, and returns what it printed; `None` if the machine has no such program.
    async fn run(&self, program: &str, common: &[&str], args: &str) -> Option<String> {
        let mut command = Command::new(program);
        let args = self.fill(args);
        command
            .args(common)
            .args(args.split('|'))
            .stdin(Stdio::null());
        match timeout(PATIENCE, command.kill_on_drop(true).output()).await {
            Ok(Ok(output)) => {
                let said = [output.stdout, output.stderr].concat();
                Some(String::from_utf8_lossy(&said).into_owned())
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                not_run(&format!("hostile HTTP from {program}: it is missing"));
                None
            }
            failed => panic!("{program} {args}: {failed:?}"),
        }
    }

    /// Sends bytes, and returns those that come back until the server, or a client that leaves, ends the connection.
    async fn send(&self, bytes: &[u8], outcome: Outcome) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.server.addr).await.unwrap();
        let (mut reader, mut writer) = stream.split();
        let mut answer = Vec::new();
        let reading = async {
            // The server may reset the connection.
            let _ended = timeout(PATIENCE, reader.read_to_end(&mut answer)).await;
        };
        let leaving = async {
            match outcome {
                Left("") => sleep(ms(300)).await,
                Left(_) => self.server.wait_until("begun", || self.has_begun()).await,
                _ => pending().await,
            }
        };
        let writing = async {
            let _sent = writer.write_all(bytes).await;
            pending::<()>().await;
        };
        tokio::select! {
            () = reading => {}
            () = writing => {}
            () = leaving => {}
        }
        answer
    }

    fn has_begun(&self) -> bool {
        !self.seen.lock().unwrap().handled.is_empty()
    }

    /// Takes what the handler got.
    fn handled(&self, row: &str) -> Vec<String> {
        let seen = std::mem::take(&mut *self.seen.lock().unwrap());
        assert_eq!(seen.wrong.first(), None, "{row:?}");
        seen.handled
    }

    /// Checks what became of a row, of whose requests so many were answered with success.
    async fn check(&self, row: &str, answered: usize, outcome: Outcome) {
        let is_free = || self.server.nodes.locks() == [0, 0, 0] && self.server.in_flight() == 0;
        let free = format!("free of {row:?}");
        self.server.wait_until(&free, is_free).await;
        let held = self.server.redlock.held();
        assert!(held.is_empty(), "{row:?}: {held:?}");
        let handled = self.handled(row);
        let (count, handled) = (handled.len(), handled.join(", "));
        let is_refused = (count, answered) == (0, 0);
        let is_served = |list| handled == self.fill(list) && answered == count;
        let is_so = match outcome {
            Served(list) => is_served(list),
            Refused => is_refused,
            Either(list) => is_served(list) || is_refused,
            Left(list) => handled == self.fill(list),
            Any => true,
        };
        assert!(is_so, "{row:?}: not {outcome:?}: {answered} of {handled:?}");
        let next = format!("/{}/next", self.route);
        let next = http::request(self.server.addr, "POST", &next, &[], b"").await;
        assert_eq!(next.status, 200, "{row:?}");
        assert_eq!(self.handled(row), ["POST next 0"], "{row:?}");
    }
}

/// Counts the heads of successful responses that a client printed, or got.
fn successes(said: &str) -> usize {
    let heads = said.lines().filter(|line| {
        let status = line
            .strip_prefix("HTTP/")
            .and_then(|rest| rest.split(' ').nth(1));
        let status = status.or_else(|| Some(line.split_once(":status: ")?.1));
        status.is_some_and(|status| status.starts_with('2'))
    });
    heads.count()
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let stream = stream.to_be_bytes();
    [&length[1..], &[kind, flags], &stream, payload].concat()
}

/// Encodes fields as literals (RFC 7541, section 6.2.2).
fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let literal = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let fields = fields.iter();
    fields
        .flat_map(|(name, value)| [vec![0], literal(name), literal(value)].concat())
        .collect()
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
// Kinds of frames and their flags (RFC 9113, section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// In bytes; a path of this length is too long, too.
const BODY_LIMIT: usize = 70_000;
