//! Exposes the encoder and the decoder of Redis nodes to fuzz targets.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use deadpool_redis::redis::Value;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::node::failure::NodeFailure;
use crate::node::redis::decode;
use crate::node::redis::guard::Guard;
use crate::node::redis::link::Link;
use crate::node::redis::listener;
use crate::node::redis::table::{EncodedCommand, GenerationCheck, encode_call_into};
use crate::protocol::admission::Generation;
use crate::protocol::message::{Command, Reply};

/// The replies that arrive on a stream.
#[expect(missing_debug_implementations, reason = "only fuzz targets use it")]
pub struct ReplyStream(Link);

impl ReplyStream {
    /// Takes over a stream.
    pub fn new(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self(Link::new(stream))
    }

    /// Reads the next reply.
    pub fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Result<Value, Arc<str>>> {
        self.0.poll_reply(context)
    }
}

/// Decodes the reply to a command.
///
/// # Errors
///
/// The reply is no vote.
pub fn decode(command: &Command, reply: &Value) -> Result<Reply, NodeFailure> {
    decode::decode(command, reply, &"node".into())
}

/// Deals the reply to a call out to its commands.
#[must_use]
pub fn deal(mut reply: Value, commands: &[Command]) -> Vec<Value> {
    let (count, commands) = (commands.len(), commands.iter().enumerate());
    let each = commands.map(|(place, command)| decode::deal(&mut reply, count, place, &command.op));
    each.collect()
}

/// Encodes commands as one call to a server with this generation key and generation; `None` if they may not share one. Each
/// is given with whether it notifies.
#[must_use]
pub fn encode(
    requests: &[(Command, bool)],
    key: Option<Arc<[u8]>>,
    generation: Option<Generation>,
) -> Option<Vec<u8>> {
    let check = &GenerationCheck {
        key,
        generation,
        in_cluster_mode: false,
    };
    let commands = requests.iter();
    let commands =
        commands.map(|(command, notifies)| EncodedCommand::new(command, *notifies, check));
    let commands: Vec<_> = commands.collect();
    let may_share = |one: &EncodedCommand| one.key_hash.is_some() && one.is_shareable(check);
    let are_alike =
        |pair: &[EncodedCommand]| pair.iter().all(may_share) && pair[0].is_like(&pair[1]);
    let mut written = BytesMut::new();
    encode_call_into(commands.iter(), check, &mut written);
    commands.windows(2).all(are_alike).then(|| written.into())
}

/// The restart guard of a lock service.
#[derive(Debug)]
pub struct AdmissionGuard(Arc<Guard>);

impl AdmissionGuard {
    /// Creates a guard, which is off without a generation key.
    #[must_use]
    pub fn new(window: Duration, generation_key: Option<Arc<[u8]>>) -> Self {
        Self(Guard::new(window, generation_key))
    }

    /// Admits the server behind a stream, and returns for how long it must not vote.
    ///
    /// # Errors
    ///
    /// The server must never vote.
    pub async fn admit(
        &self,
        node: &Arc<str>,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        attempt: Duration,
    ) -> Result<Duration, Arc<str>> {
        let mut link = Link::new(stream);
        let (_, left) = self.0.admit(node, &mut link, attempt).await?;
        Ok(left)
    }

    /// Returns another name of the same server.
    #[must_use]
    pub fn duplicate_of(&self, node: &str) -> Option<Arc<str>> {
        self.0.duplicate_of(node)
    }
}

/// Reads a message: the lock that was released, and the number of subscribers.
#[must_use]
pub fn read_release(reply: &Value) -> Option<(&[u8], usize)> {
    listener::read_release(reply)
}
