//! A real server that runs scripts as the Redis node sends them.

use crate::redis_server::RedisServer;
use crate::resp::{Connection, Reply};

/// A server, one connection to it, and the scripts that were loaded there.
#[derive(Debug)]
pub struct ScriptNode {
    pub server: RedisServer,
    connection: Connection,
    scripts: Vec<String>,
    hashes: Vec<String>,
}

impl ScriptNode {
    /// Starts a server and loads scripts, which are later named by their place in the list.
    #[track_caller]
    pub fn start(scripts: &[&str]) -> Self {
        let server = RedisServer::start();
        let connection = Connection::open(server.addr()).expect("the server answers");
        let mut node = Self {
            server,
            connection,
            scripts: scripts.iter().map(|script| (*script).to_owned()).collect(),
            hashes: Vec::new(),
        };
        node.load_scripts();
        node
    }

    /// Loads the scripts, also after the server has forgotten them.
    #[track_caller]
    pub fn load_scripts(&mut self) {
        self.hashes.clear();
        let beginning = match self.server.is_in_cluster_mode() {
            true => include_str!("../../src/node/redis/scripts/cluster_mode.lua"),
            false => "",
        };
        for script in self.scripts.clone() {
            let script = beginning.to_owned() + &script;
            let hash = self.call(&["SCRIPT", "LOAD", &script]);
            let hash = hash.as_str().expect("the script is a script");
            self.hashes.push(hash.to_owned());
        }
    }

    /// Runs a script; an error is what the server said.
    #[track_caller]
    pub fn eval(&mut self, script: usize, keys: &[&[u8]], args: &[&[u8]]) -> Result<Reply, String> {
        let count = keys.len().to_string();
        let declared: &[&[u8]] = match self.server.is_in_cluster_mode() {
            true => &[b"0", count.as_bytes()],
            false => &[count.as_bytes()],
        };
        let head: [&[u8]; 2] = [b"EVALSHA", self.hashes[script].as_bytes()];
        let parts: Vec<&[u8]> = [&head, declared, keys, args].concat();
        match self.connection.call_with_bytes(&parts) {
            Ok(Reply::Error(error)) => Err(error),
            Ok(reply) => Ok(reply),
            Err(error) => panic!("a script was not answered: {error}"),
        }
    }

    /// Runs a command.
    #[track_caller]
    pub fn call(&mut self, command: &[&str]) -> Reply {
        let reply = self.connection.call(command);
        reply.unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// Puts a foreign value into a key of ours.
    #[track_caller]
    pub fn put_foreign(&mut self, key: &str, kind: &str) {
        self.call(&["DEL", key]);
        match kind {
            "list" => self.call(&["RPUSH", key, "a", "b"]),
            "hash" => self.call(&["HSET", key, "a", "b"]),
            "empty" => self.call(&["SET", key, ""]),
            "number" => self.call(&["SET", key, "42"]),
            _ => self.call(&["SET", key, "nothing of ours"]),
        };
    }

    /// Returns all that is in a key, of whatever type.
    #[track_caller]
    pub fn dump(&mut self, key: &str) -> Reply {
        let kind = self.call(&["TYPE", key]);
        let value = match kind.as_str() {
            Some("list") => self.call(&["LRANGE", key, "0", "-1"]),
            Some("hash") => self.call(&["HGETALL", key]),
            _ => self.call(&["GET", key]),
        };
        Reply::Array(Some(vec![kind, value]))
    }
}
