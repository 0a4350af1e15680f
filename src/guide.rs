//! Chapters on what no signature says: a path for newcomers, and reference.
//!
//! The path for newcomers is an afternoon of reading: the [front page](crate), and then these chapters, in this order.
//!
//! | to | read |
//! |---|---|
//! | lock a first route, from `cargo new` on | [Getting started](getting_started) |
//! | name what a lock protects | [Choosing keys](choosing_keys) |
//! | execute a retried request once | [Idempotency](mod@idempotency) |
//! | run the Redis servers | [Operating the nodes](operating_the_nodes) |
//!
//! The rest is reference, for when you need it:
//!
//! | to | read |
//! |---|---|
//! | know what a lock can promise, and what the token adds | [What is this lock for?](what_is_this_lock_for) |
//! | set waits, react to a lost lock, stop a process cleanly | [Waiting, losing, shutting down](waiting_and_losing) |
//! | share a key among readers, bound its callers, lead, free a key | [Kinds of locks](kinds_of_locks) |
//! | retry as a client, and know what each answer means | [Clients](clients) |
//! | solve a common problem | [Recipes](recipes) |
//! | test a handler that locks | [Testing your handlers](testing_your_handlers) |
//! | look up a setting and its default | [Settings](settings) |
//! | look up a status, a code or a message | [Troubleshooting](troubleshooting) |
//! | see locks in logs, metrics and alerts | [Observability](observability) |
//! | rent the Redis servers from a provider | [Managed servers](managed_servers) |
//! | spread the keys over several groups of servers | [Scaling out](scaling_out) |
//! | replace another Redlock library | [Migrating](migrating) |
//! | compare libraries and other kinds of locks | [Comparison](comparison) |
//! | know what a lock costs | [Speed](speed) |
//! | understand the protocol, with pictures | [How it works](how_it_works) |
//! | judge the evidence, as a reader of the code | [Proofs](proofs) |
//! | know what a release changed | [Changelog](changelog) |
//! | report a vulnerability | [Security](security) |
//!
//! The chapters are the files of the folder `docs` of the repository, and can be read there too. The last two are
//! `CHANGELOG.md` and `SECURITY.md` in the root of the repository.
#![cfg_attr(
    not(all(
        feature = "axum",
        feature = "redis",
        feature = "idempotency",
        feature = "client"
    )),
    allow(
        rustdoc::broken_intra_doc_links,
        reason = "the chapters also name items of features that are off"
    )
)]

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/choosing_keys.md")]
pub mod choosing_keys {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("guide/images/playground_fencing.md")]
#[doc = include_str!("../docs/what_is_this_lock_for.md")]
pub mod what_is_this_lock_for {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/waiting_and_losing.md")]
pub mod waiting_and_losing {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/kinds_of_locks.md")]
pub mod kinds_of_locks {}

#[cfg(feature = "idempotency")]
#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/idempotency.md")]
pub mod idempotency {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/clients.md")]
pub mod clients {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/operating_the_nodes.md")]
pub mod operating_the_nodes {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/managed_servers.md")]
pub mod managed_servers {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/scaling_out.md")]
pub mod scaling_out {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/observability.md")]
pub mod observability {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/testing_your_handlers.md")]
pub mod testing_your_handlers {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("guide/images/lock_life.md")]
#[doc = include_str!("guide/images/split_votes.md")]
#[doc = include_str!("guide/images/tokens.md")]
#[doc = include_str!("guide/images/quarantine.md")]
#[doc = include_str!("../docs/how_it_works.md")]
pub mod how_it_works {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/proofs.md")]
pub mod proofs {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/comparison.md")]
pub mod comparison {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/migrating.md")]
pub mod migrating {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/troubleshooting.md")]
pub mod troubleshooting {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/getting_started.md")]
pub mod getting_started {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {
    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/one_withdrawal_at_a_time.md")]
    pub mod one_withdrawal_at_a_time {}

    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/nightly_job_once.md")]
    pub mod nightly_job_once {}

    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/webhook_delivered_twice.md")]
    pub mod webhook_delivered_twice {}

    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/limit_per_tenant.md")]
    pub mod limit_per_tenant {}

    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/who_blocks_me.md")]
    pub mod who_blocks_me {}

    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/websocket_editor.md")]
    pub mod websocket_editor {}

    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/fenced_writes_in_postgres.md")]
    pub mod fenced_writes_in_postgres {}
}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/settings.md")]
pub mod settings {}

// The picture first: its name is that of the chapter, too.
#[doc = include_str!("guide/images/speed.md")]
#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/speed.md")]
pub mod speed {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../CHANGELOG.md")]
pub mod changelog {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../SECURITY.md")]
pub mod security {}
