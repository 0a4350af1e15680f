//! Free ports that stay free until a server is started (again) on them.

use std::net::{Ipv4Addr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a port of 127.0.0.1 on which nothing listens, each time another one.
///
/// The ports lie below those that operating systems give to outgoing connections, so that the port
/// of a killed server is still free when the server is restarted.
pub fn free_port() -> u16 {
    // Test binaries that run at the same time begin at different places.
    let first = process::id().wrapping_mul(37);
    (0..RANGE)
        .map(|_| first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % RANGE)
        .filter_map(|offset| u16::try_from(LOWEST + offset).ok())
        .find(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok())
        .expect("a port between 20000 and 31999 is free on 127.0.0.1")
}

static NEXT: AtomicU32 = AtomicU32::new(0);

const LOWEST: u32 = 20_000;
const RANGE: u32 = 12_000;
