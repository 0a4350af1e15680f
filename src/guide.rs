//! Chapters on what no signature says: from the first locked route to the measurements.

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/getting_started.md")]
pub mod getting_started {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/what_is_this_lock_for.md")]
pub mod what_is_this_lock_for {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/operating_the_nodes.md")]
pub mod operating_the_nodes {}

#[cfg(feature = "idempotency")]
#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/idempotency.md")]
pub mod idempotency {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/observability.md")]
pub mod observability {}

#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/settings.md")]
pub mod settings {}

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
    #[doc = include_str!("../docs/recipes/websocket_editor.md")]
    pub mod websocket_editor {}

    #[doc = include_str!("guide/links.md")]
    #[doc = include_str!("../docs/recipes/fenced_writes_in_postgres.md")]
    pub mod fenced_writes_in_postgres {}
}

// The picture first: its name is that of the chapter, too.
#[doc = include_str!("guide/images/speed.md")]
#[doc = include_str!("guide/links.md")]
#[doc = include_str!("../docs/speed.md")]
pub mod speed {}
