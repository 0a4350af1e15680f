//! Packets: commands that all nodes of one attempt share.

use std::sync::Arc;
#[cfg(feature = "redis")]
use std::sync::OnceLock;
#[cfg(feature = "redis")]
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

use crate::protocol::message::Command;

/// A command, encoded once and shared by all nodes.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) command: Command,
    /// Whether a node does more than it must: it notifies the subscribers of a lock that it releases, or says what
    /// refuses an acquisition, which the plain `SET` does not.
    pub(crate) notifies: bool,
    /// When the intent has certainly expired, for a release that takes one back; until when the keys stay taken, for one
    /// that leaves them taken.
    #[cfg_attr(
        not(any(feature = "redis", feature = "test-util")),
        expect(dead_code, reason = "embedded nodes answer at once")
    )]
    pub(crate) until: Option<Instant>,
    /// The trail of its attempt.
    #[cfg_attr(
        not(feature = "redis"),
        expect(dead_code, reason = "embedded nodes queue nothing")
    )]
    pub(crate) trail: Trail,
    /// The command as it goes over the wire.
    #[cfg(feature = "redis")]
    pub(crate) encoded: OnceLock<EncodedCommand>,
    /// The hash of its lock's name, which tells whether two commands may be on one key.
    #[cfg(feature = "redis")]
    pub(crate) hash: OnceLock<u64>,
    /// Its part of a call for several commands.
    #[cfg(feature = "redis")]
    pub(crate) part: OnceLock<EncodedPart>,
}

/// The arguments of a command as they go over the wire.
#[cfg(feature = "redis")]
#[derive(Debug)]
pub(crate) struct EncodedCommand {
    pub(crate) arguments: usize,
    pub(crate) bytes: Vec<u8>,
}

/// The part of a command in a call for several commands, as it goes over the wire.
#[cfg(feature = "redis")]
#[derive(Debug)]
pub(crate) struct EncodedPart {
    /// Its keys, and behind them its own arguments.
    pub(crate) bytes: Vec<u8>,
    /// The length of the keys.
    pub(crate) keys: usize,
}

/// The nodes to which an attempt has sent requests, and those whose lane has taken its release.
///
/// An acquisition that was not sent needs no release, which is then called off. An acquisition must not be sent, or
/// sent again, once the lane has taken its release. For each node, one task sends acquisitions and takes releases, so
/// no check races with an update.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trail(#[cfg(feature = "redis")] Arc<Marks>);

/// One bit for each node.
#[cfg(feature = "redis")]
#[derive(Debug, Default)]
struct Marks {
    sent: AtomicU64,
    released: AtomicU64,
}

impl Packet {
    /// Creates a packet of no attempt.
    pub(crate) fn new(command: Command) -> Arc<Self> {
        Self::of_attempt(command, false, Trail::default())
    }

    /// Creates a packet of the attempt with this trail.
    pub(crate) fn of_attempt(command: Command, notifies: bool, trail: Trail) -> Arc<Self> {
        Self::of_release(None, command, notifies, trail)
    }

    /// Creates the packet of a release for which a time counts; see [`until`](Self::until).
    pub(crate) fn of_release(
        until: Option<Instant>,
        command: Command,
        notifies: bool,
        trail: Trail,
    ) -> Arc<Self> {
        Arc::new(Self {
            command,
            notifies,
            until,
            trail,
            #[cfg(feature = "redis")]
            encoded: OnceLock::new(),
            #[cfg(feature = "redis")]
            hash: OnceLock::new(),
            #[cfg(feature = "redis")]
            part: OnceLock::new(),
        })
    }

    /// Returns the size of the record that it carries.
    #[cfg(feature = "redis")]
    pub(crate) fn bytes(&self) -> usize {
        self.command.op.record_bytes()
    }
}

#[cfg(feature = "redis")]
impl Trail {
    pub(crate) fn mark_sent(&self, node: usize) {
        // Relaxed here and below: a node's bits are set and read by its lane only.
        self.0.sent.fetch_or(bit(node), Ordering::Relaxed);
    }

    pub(crate) fn mark_released(&self, node: usize) {
        self.0.released.fetch_or(bit(node), Ordering::Relaxed);
    }

    /// Returns whether the lane has taken the release. Always true beyond 64 nodes.
    pub(crate) fn is_released(&self, node: usize) -> bool {
        let bit = bit(node);
        bit == 0 || self.0.released.load(Ordering::Relaxed) & bit != 0
    }

    /// Returns whether the lane has taken the release, and nothing was sent before it.
    pub(crate) fn is_called_off(&self, node: usize) -> bool {
        let bit = bit(node);
        bit != 0
            && self.0.released.load(Ordering::Relaxed) & bit != 0
            && self.0.sent.load(Ordering::Relaxed) & bit == 0
    }
}

/// Returns the bit of a node; none beyond 64 nodes, whose acquisitions are always released.
#[cfg(feature = "redis")]
fn bit(node: usize) -> u64 {
    u32::try_from(node)
        .ok()
        .and_then(|node| 1_u64.checked_shl(node))
        .unwrap_or(0)
}
