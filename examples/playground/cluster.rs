//! The nodes of one instance: embedded ones, or real servers.

use std::io;
use std::sync::Arc;

use tower_redlock::RedlockBuilder;

use crate::NODES;
use crate::board::{Board, Power};
use crate::embedded::EmbeddedNodes;
use crate::redis::RedisNodes;

/// Five nodes, which can be broken and mended.
#[derive(Debug)]
pub(crate) struct Cluster {
    board: Arc<Board>,
    nodes: Nodes,
    /// Held while a node starts, so that none is started twice.
    starting: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
enum Nodes {
    Embedded(EmbeddedNodes),
    Redis(RedisNodes),
}

impl Cluster {
    pub(crate) async fn start(
        board: &Arc<Board>,
        is_guarded: bool,
        with_redis: bool,
    ) -> io::Result<Self> {
        let nodes = if with_redis {
            Nodes::Redis(RedisNodes::start(board).await?)
        } else {
            Nodes::Embedded(EmbeddedNodes::new(board, is_guarded))
        };
        Ok(Self {
            board: Arc::clone(board),
            nodes,
            starting: tokio::sync::Mutex::default(),
        })
    }

    /// Adds the nodes as one server reaches them.
    pub(crate) fn connect(&self, builder: RedlockBuilder, server: usize) -> RedlockBuilder {
        match &self.nodes {
            Nodes::Embedded(nodes) => builder.simulated(NODES, nodes.connect(server)),
            Nodes::Redis(nodes) => builder.urls(nodes.urls(server)),
        }
    }

    pub(crate) fn kill(&self, node: usize) {
        self.board.set_power(node, Power::Down);
        self.board.forgot(node);
        if let Nodes::Redis(nodes) = &self.nodes {
            nodes.kill(node);
        }
    }

    pub(crate) async fn restart(&self, node: usize) -> io::Result<()> {
        let _starting = self.starting.lock().await;
        if self.board.power(node) != Power::Down {
            return Ok(());
        }
        match &self.nodes {
            Nodes::Embedded(nodes) => nodes.restart(node),
            Nodes::Redis(nodes) => nodes.restart(node).await?,
        }
        self.board.started(node);
        Ok(())
    }

    /// Shows the servers that ended by themselves, or by another hand, as down.
    pub(crate) fn notice_ends(&self) {
        let Nodes::Redis(nodes) = &self.nodes else {
            return;
        };
        for node in 0..NODES {
            if self.board.power(node) != Power::Down && nodes.has_ended(node) {
                self.board.set_power(node, Power::Down);
                self.board.forgot(node);
            }
        }
    }

    pub(crate) fn hang(&self, node: usize) -> io::Result<()> {
        if let Nodes::Redis(nodes) = &self.nodes {
            nodes.stop(node)?;
        }
        self.board.set_power(node, Power::Hung);
        Ok(())
    }

    pub(crate) fn resume(&self, node: usize) -> io::Result<()> {
        if let Nodes::Redis(nodes) = &self.nodes {
            nodes.resume(node)?;
        }
        self.board.set_power(node, Power::Up);
        Ok(())
    }

    pub(crate) async fn wipe(&self, node: usize) -> io::Result<()> {
        match &self.nodes {
            Nodes::Embedded(nodes) => nodes.wipe(node),
            Nodes::Redis(nodes) => nodes.wipe(node).await?,
        }
        Ok(())
    }
}
