//! What the fuzz targets share: streams in pieces, requests from lines, and the measurement of memory.

#![forbid(unsafe_code)]

use std::io::{Error, Result};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::Body;
use peak_alloc::PeakAlloc;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Returns by how many bytes the memory of the program grew at most while a function ran.
pub fn growth<T>(run: impl FnOnce() -> T) -> (T, usize) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let returned = run();
    (returned, MEMORY.peak_usage().saturating_sub(before))
}

/// A stream that returns bytes in pieces and then ends, and that takes all that is written.
pub struct Pieces {
    bytes: Vec<u8>,
    /// The sizes of the pieces, which repeat; all bytes are one piece without any.
    sizes: Vec<usize>,
    read: usize,
    pieces: usize,
}

impl Pieces {
    pub fn new(bytes: &[u8], sizes: &[usize]) -> Self {
        Self {
            bytes: bytes.to_vec(),
            sizes: sizes.to_vec(),
            read: 0,
            pieces: 0,
        }
    }
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let rest = self.bytes.len() - self.read;
        let size = match self.sizes.len() {
            0 => rest,
            count => self.sizes[self.pieces % count].max(1),
        };
        let size = size.min(rest).min(room.remaining());
        room.put_slice(&self.bytes[self.read..self.read + size]);
        self.read += size;
        self.pieces += 1;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Err(Error::other("never shut down")))
    }
}

/// Runs a future that never waits.
pub fn run<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    match future
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
    {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future waits, although its stream is always ready"),
    }
}

/// Splits the first line from the rest.
pub fn first_line(data: &[u8]) -> (&[u8], &[u8]) {
    match data.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&data[..end], &data[end + 1..]),
        None => (data, b""),
    }
}

/// Replaces `0xFE` and the byte behind it by that many kibibytes of the byte in front: so a short input can stand for
/// a long one.
pub fn expanded(data: &[u8]) -> Vec<u8> {
    let mut long = Vec::new();
    let mut bytes = data.iter();
    while let Some(byte) = bytes.next() {
        match (byte, long.last().copied()) {
            (0xFE, Some(last)) => {
                let kibibytes = bytes.next().map_or(1, |count| usize::from(*count));
                long.resize(long.len() + 1024 * kibibytes, last);
            }
            _ => long.push(*byte),
        }
    }
    long
}

/// Reads parts of at most 255 bytes, each of which has its length in front.
pub fn parts_of(mut data: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while let Some((length, rest)) = data.split_first() {
        let (part, behind) = rest.split_at(usize::from(*length).min(rest.len()));
        parts.push(part);
        data = behind;
    }
    parts
}

/// Returns the values that HTTP allows, without the white space around them, which HTTP removes.
pub fn header_values(data: &[u8]) -> Vec<HeaderValue> {
    let lines = data.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| HeaderValue::from_bytes(line.trim_ascii()).ok())
        .collect()
}

/// Reads lines of names and values, up to an empty one; also returns the rest.
pub fn header_map(mut data: &[u8]) -> (HeaderMap, &[u8]) {
    let mut headers = HeaderMap::new();
    loop {
        let (line, rest) = first_line(data);
        data = rest;
        if line.is_empty() {
            return (headers, rest);
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let name = HeaderName::from_bytes(&line[..colon]);
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
}

/// Returns the head of a request with a header of each value.
pub fn request(name: &'static str, values: &[HeaderValue]) -> Parts {
    let mut parts = Request::new(()).into_parts().0;
    for value in values {
        parts.headers.append(name, value.clone());
    }
    parts
}

/// Reads the body of a response: its bytes and its trailers.
pub fn read_body<B: Body<Data = Bytes>>(response: Response<B>) -> (Vec<u8>, Option<HeaderMap>) {
    let mut body = pin!(response.into_body());
    let (mut data, mut trailers) = (Vec::new(), None);
    let mut context = Context::from_waker(Waker::noop());
    while let Poll::Ready(Some(Ok(frame))) = body.as_mut().poll_frame(&mut context) {
        match frame.into_data() {
            Ok(piece) => data.extend_from_slice(&piece),
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    (data, trailers)
}

pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}
