//! A small blocking RESP2 client, so that tests look at the nodes without the crate's own client.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// What a server answers to one command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Simple(String),
    Error(String),
    Int(i64),
    Bulk(Option<Vec<u8>>),
    Array(Option<Vec<Self>>),
}

impl Reply {
    /// Returns the text of a simple or a bulk string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Simple(text) => Some(text),
            Self::Bulk(Some(bytes)) => std::str::from_utf8(bytes).ok(),
            Self::Error(_) | Self::Int(_) | Self::Bulk(None) | Self::Array(_) => None,
        }
    }

    /// Returns an integer, also one that came as text (`GET` of a counter).
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            other => other.as_str()?.parse().ok(),
        }
    }

    /// Returns the elements of an array.
    pub fn as_array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(elements) => elements.as_deref(),
            Self::Simple(_) | Self::Error(_) | Self::Int(_) | Self::Bulk(_) => None,
        }
    }

    /// Returns whether this is the null bulk string or the null array.
    pub fn is_nil(&self) -> bool {
        matches!(self, Self::Bulk(None) | Self::Array(None))
    }
}

/// One connection to a server.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects, with 5 s for that and for each answer.
    pub fn open(addr: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Sends a command and returns its answer.
    pub fn call(&mut self, command: &[&str]) -> io::Result<Reply> {
        let parts: Vec<&[u8]> = command.iter().map(|part| part.as_bytes()).collect();
        self.call_with_bytes(&parts)
    }

    /// Sends a command like [`Connection::call`], of parts that need not be text.
    pub fn call_with_bytes(&mut self, command: &[&[u8]]) -> io::Result<Reply> {
        let mut bytes = format!("*{}\r\n", command.len()).into_bytes();
        for part in command {
            bytes.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
            bytes.extend_from_slice(part);
            bytes.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&bytes)?;
        self.read_reply()
    }

    /// Reads one answer, or one line of a server that was told to `MONITOR`.
    pub fn read_reply(&mut self) -> io::Result<Reply> {
        let line = self.read_line()?;
        let (Some(kind), Some(rest)) = (line.get(..1), line.get(1..)) else {
            return Err(malformed(&line));
        };
        match kind {
            "+" => Ok(Reply::Simple(rest.to_owned())),
            "-" => Ok(Reply::Error(rest.to_owned())),
            ":" => rest.parse().map(Reply::Int).map_err(|_| malformed(&line)),
            "$" => Ok(Reply::Bulk(match length(rest)? {
                None => None,
                Some(length) => Some(self.read_bulk(length)?),
            })),
            "*" => Ok(Reply::Array(match length(rest)? {
                None => None,
                Some(length) => Some(
                    (0..length)
                        .map(|_| self.read_reply())
                        .collect::<io::Result<_>>()?,
                ),
            })),
            _ => Err(malformed(&line)),
        }
    }

    /// Lets reads wait without an end; [`Connection::closer`] ends them.
    pub fn read_without_timeout(&self) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(None)
    }

    /// Returns what closes this connection while another thread reads from it.
    pub fn closer(&self) -> io::Result<Closer> {
        self.stream.get_ref().try_clone().map(Closer)
    }

    fn read_line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = String::from_utf8_lossy(&line);
        Ok(line.trim_end_matches(['\r', '\n']).to_owned())
    }

    fn read_bulk(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length + 2];
        self.stream.read_exact(&mut bytes)?;
        bytes.truncate(length);
        Ok(bytes)
    }
}

/// Closes a [`Connection`] that another thread is reading from.
#[derive(Debug)]
pub struct Closer(TcpStream);

impl Closer {
    /// Closes the connection; the reading thread sees the end of the stream.
    pub fn close(&self) {
        // An error means that it is closed already.
        self.0.shutdown(Shutdown::Both).ok();
    }
}

/// Parses a length, where -1 stands for the null value.
fn length(text: &str) -> io::Result<Option<usize>> {
    if text == "-1" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| malformed(text))
}

fn malformed(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not RESP2: {line:?}"))
}

const TIMEOUT: Duration = Duration::from_secs(5);
