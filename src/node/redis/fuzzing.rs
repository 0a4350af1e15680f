//! Exposes how requests share calls to fuzz targets.

use std::sync::Arc;

use bytes::BytesMut;
use deadpool_redis::redis::Value;

use crate::node::redis::decode;
use crate::node::redis::table::{EncodedCommand, GenerationCheck, encode_call_into};
use crate::protocol::message::Command;

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
    generation: Option<&str>,
) -> Option<Vec<u8>> {
    let check = &GenerationCheck {
        key,
        generation: generation.map(Arc::from),
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
