//! Opening the connections of lanes: everything that one goes through before the server's votes on it count.

use std::sync::Arc;

use deadpool::managed::Manager;

use crate::node::redis::guard::Admission;
use crate::node::redis::link::Link;
use crate::node::redis::shared::Shared;
use crate::node::redis::table::load_all;

/// A connection that is ready for lock commands.
pub(super) struct Opened {
    pub(super) link: Link,
    /// Whether and when its server may vote.
    pub(super) admission: Option<Admission>,
}

/// Opens a connection and prepares it for lock commands, on the very connection that is kept.
///
/// It does not come out of the pool: the name may lead to another server since an idle connection was opened, and
/// that one may be dead.
pub(super) async fn open(shared: &Shared) -> Result<Opened, Arc<str>> {
    let mut link = shared.pool.manager().create().await?;
    link.call_all(&load_all()).await?;
    let admission = match &shared.guard {
        Some(guard) => {
            let attempt = shared.timeouts.connect + shared.timeouts.node;
            Some(guard.admit(&shared.name, &mut link, attempt).await?)
        }
        None => None,
    };
    Ok(Opened { link, admission })
}
