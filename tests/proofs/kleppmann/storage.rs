//! A storage with two registers: one checks fencing tokens, the other accepts every write.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// The storage, which clients reach by TCP; each client is known by its connection.
#[derive(Debug)]
pub(crate) struct Storage {
    addr: SocketAddr,
    content: Arc<Mutex<Content>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// All that is stored; one mutex, because a check of the token apart from the write is none.
#[derive(Debug, Default, Clone)]
pub(crate) struct Content {
    /// What was written with a token that was not lower than any seen before.
    pub(crate) fenced: String,
    /// What was written last.
    pub(crate) plain: String,
    /// What clients told about themselves, in the order in which it arrived.
    pub(crate) notes: Vec<String>,
    highest: u64,
}

impl Storage {
    pub(crate) fn start() -> Self {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("127.0.0.1 has a free port");
        let addr = listener.local_addr().expect("a bound listener has one");
        let (content, stop) = (Arc::<Mutex<Content>>::default(), Arc::default());
        let (shared, stopped) = (Arc::clone(&content), Arc::<AtomicBool>::clone(&stop));
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                if let Ok(stream) = stream {
                    let content = Arc::clone(&shared);
                    thread::spawn(move || serve(stream, &content));
                }
            }
        });
        Self {
            addr,
            content,
            stop,
            thread: Some(thread),
        }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns what is stored now.
    pub(crate) fn content(&self) -> Content {
        lock(&self.content).clone()
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the thread, which may have ended by itself.
        TcpStream::connect(self.addr).ok();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// One client's connection to the storage.
#[derive(Debug)]
pub(crate) struct Access(BufReader<TcpStream>);

impl Access {
    pub(crate) fn open(addr: &str) -> Self {
        let stream = TcpStream::connect(addr).expect("the storage runs as long as its test");
        stream.set_nodelay(true).expect("TCP has it");
        Self(BufReader::new(stream))
    }

    pub(crate) fn read_fenced(&mut self) -> String {
        self.ask("READ").expect("it is never refused")
    }

    /// Writes the register that checks tokens; returns whether it was accepted.
    pub(crate) fn write_fenced(&mut self, token: u64, value: &str) -> bool {
        self.ask(&format!("WRITE {token} {value}")).is_some()
    }

    pub(crate) fn read_plain(&mut self) -> String {
        self.ask("PEEK").expect("it is never refused")
    }

    pub(crate) fn write_plain(&mut self, value: &str) {
        self.ask(&format!("PUT {value}"))
            .expect("it is never refused");
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.ask(&format!("NOTE {text}"))
            .expect("it is never refused");
    }

    fn ask(&mut self, line: &str) -> Option<String> {
        let asked = self.0.get_mut().write_all(format!("{line}\n").as_bytes());
        let mut answer = String::new();
        asked
            .and_then(|()| self.0.read_line(&mut answer))
            .expect("the storage runs as long as its test");
        let answer = answer.strip_suffix('\n').expect("answers are lines");
        answer.strip_prefix("OK ").map(str::to_owned)
    }
}

/// Serves one client until it closes.
fn serve(stream: TcpStream, content: &Mutex<Content>) {
    stream.set_nodelay(true).ok();
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while stream.read_line(&mut line).is_ok_and(|read| read > 0) {
        let answer = match lock(content).apply(line.trim_end_matches('\n')) {
            Some(value) => format!("OK {value}\n"),
            None => "REFUSED\n".to_owned(),
        };
        if stream.get_mut().write_all(answer.as_bytes()).is_err() {
            return;
        }
        line.clear();
    }
}

impl Content {
    fn apply(&mut self, line: &str) -> Option<String> {
        let (order, rest) = line.split_once(' ').unwrap_or((line, ""));
        match order {
            "READ" => Some(self.fenced.clone()),
            "WRITE" => {
                let (token, value) = rest.split_once(' ').expect("a write has both");
                let token = token.parse().expect("tokens are numbers");
                // Equal is right: one holder writes many times.
                if token < self.highest {
                    return None;
                }
                self.highest = token;
                value.clone_into(&mut self.fenced);
                Some(String::new())
            }
            "PEEK" => Some(self.plain.clone()),
            "PUT" => {
                rest.clone_into(&mut self.plain);
                Some(String::new())
            }
            "NOTE" => {
                self.notes.push(rest.to_owned());
                Some(String::new())
            }
            _ => panic!("no order: {line:?}"),
        }
    }
}

/// Locks also what a panicking thread left behind: each order is carried out as a whole.
fn lock(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}
