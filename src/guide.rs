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

/// Makes a module of each chapter, whose links are those of the list. Its pictures come first: one has the name of its
/// chapter, too.
macro_rules! chapters {
    ($($(#[$attribute:meta])* $chapter:ident = $path:literal;)+) => {$(
        $(#[$attribute])*
        #[doc = include_str!("guide/links.md")]
        #[doc = include_str!($path)]
        pub mod $chapter {}
    )+};
}

chapters! {
    choosing_keys = "../docs/choosing_keys.md";
    #[doc = include_str!("guide/images/playground_fencing.md")]
    what_is_this_lock_for = "../docs/what_is_this_lock_for.md";
    waiting_and_losing = "../docs/waiting_and_losing.md";
    kinds_of_locks = "../docs/kinds_of_locks.md";
    #[cfg(feature = "idempotency")]
    idempotency = "../docs/idempotency.md";
    clients = "../docs/clients.md";
    operating_the_nodes = "../docs/operating_the_nodes.md";
    managed_servers = "../docs/managed_servers.md";
    scaling_out = "../docs/scaling_out.md";
    observability = "../docs/observability.md";
    testing_your_handlers = "../docs/testing_your_handlers.md";
    #[doc = include_str!("guide/images/lock_life.md")]
    #[doc = include_str!("guide/images/split_votes.md")]
    #[doc = include_str!("guide/images/tokens.md")]
    #[doc = include_str!("guide/images/quarantine.md")]
    how_it_works = "../docs/how_it_works.md";
    proofs = "../docs/proofs.md";
    comparison = "../docs/comparison.md";
    migrating = "../docs/migrating.md";
    troubleshooting = "../docs/troubleshooting.md";
    getting_started = "../docs/getting_started.md";
    settings = "../docs/settings.md";
    #[doc = include_str!("guide/images/speed.md")]
    speed = "../docs/speed.md";
    changelog = "../CHANGELOG.md";
    security = "../SECURITY.md";
}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {
    chapters! {
        one_withdrawal_at_a_time = "../docs/recipes/one_withdrawal_at_a_time.md";
        nightly_job_once = "../docs/recipes/nightly_job_once.md";
        webhook_delivered_twice = "../docs/recipes/webhook_delivered_twice.md";
        limit_per_tenant = "../docs/recipes/limit_per_tenant.md";
        who_blocks_me = "../docs/recipes/who_blocks_me.md";
        websocket_editor = "../docs/recipes/websocket_editor.md";
        fenced_writes_in_postgres = "../docs/recipes/fenced_writes_in_postgres.md";
    }
}
