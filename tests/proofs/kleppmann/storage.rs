//! A storage with two registers: one checks fencing tokens, the other accepts every write.

use std::net::SocketAddr;

use support::{Connection, RedisServer, Reply};

/// The storage: a server that the locks know nothing of.
#[derive(Debug)]
pub(crate) struct Storage(RedisServer);

/// All that is stored.
#[derive(Debug)]
pub(crate) struct Content {
    /// What was written with a token that was not lower than any seen before.
    pub(crate) fenced: String,
    /// What was written last.
    pub(crate) plain: String,
}

impl Storage {
    pub(crate) fn start() -> Self {
        Self(RedisServer::start())
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.0.addr()
    }

    /// Returns what is stored now.
    pub(crate) fn content(&self) -> Content {
        let [fenced, plain] =
            [FENCED, PLAIN].map(|name| text(&self.0.command(&["HGET", KEY, name])));
        Content { fenced, plain }
    }
}

/// One client's connection to the storage.
#[derive(Debug)]
pub(crate) struct Access(Connection);

impl Access {
    pub(crate) fn open(addr: &str) -> Self {
        let addr = addr.parse().expect("it is an address");
        let connection = Connection::open(addr);
        Self(connection.expect("the storage runs as long as its test"))
    }

    pub(crate) fn read_fenced(&mut self) -> String {
        text(&self.ask(&["HGET", KEY, FENCED]))
    }

    /// Writes the register that checks tokens; returns whether it was accepted.
    pub(crate) fn write_fenced(&mut self, token: u64, value: &str) -> bool {
        let written = self.ask(&["EVAL", WRITE, "1", KEY, &token.to_string(), value]);
        written.as_int() == Some(1)
    }

    pub(crate) fn read_plain(&mut self) -> String {
        text(&self.ask(&["HGET", KEY, PLAIN]))
    }

    pub(crate) fn write_plain(&mut self, value: &str) {
        self.ask(&["HSET", KEY, PLAIN, value]);
    }

    fn ask(&mut self, command: &[&str]) -> Reply {
        let reply = self.0.call(command);
        let reply = reply.expect("the storage runs as long as its test");
        assert!(!matches!(reply, Reply::Error(_)), "{reply:?}");
        reply
    }
}

fn text(reply: &Reply) -> String {
    reply.as_str().unwrap_or_default().to_owned()
}

/// One script, because a check of the token apart from the write is none. Equal is right: one holder writes many times.
const WRITE: &str = "
    if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'highest') or '0') then return 0 end
    redis.call('HSET', KEYS[1], 'highest', ARGV[1], 'fenced', ARGV[2])
    return 1
";

const KEY: &str = "storage";
const FENCED: &str = "fenced";
const PLAIN: &str = "plain";
