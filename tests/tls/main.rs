//! TLS to the nodes: whose certificates are trusted, and what is said when they are not.

#![allow(clippy::unwrap_used, reason = "helpers fail the test that they help")]
#![allow(
    clippy::print_stdout,
    reason = "what a server refused explains a failure"
)]

mod authority;

use std::env;
use std::time::Duration;

use support::{
    ChildProcess, RedisServer, example_path, ms, secs, use_every_connection, why_unreachable,
};
use tower_redlock::deadpool_redis::redis::{Client, ClientTlsConfig, TlsCertificates};
use tower_redlock::deadpool_redis::{Manager, Pool};
use tower_redlock::{Redlock, RedlockBuilder, Released, RestartGuard};

use crate::authority::Authority;

fn unguarded() -> RedlockBuilder {
    let builder = Redlock::builder().node_timeout(ms(500));
    builder.restart_guard(RestartGuard::Off)
}

/// A server asks for a client certificate unless it is told not to, so there is one.
#[tokio::test]
async fn tls_server_of_a_private_authority_grants_locks() {
    let server = RedisServer::start();
    let authority = Authority::new("we");
    let Some(url) = authority.serve_tls(&server, "yes") else {
        return;
    };
    let client = Some(authority.certify("client"));
    let redlock = with_pool(&url, &authority, client).build().unwrap();
    let guard = redlock.try_lock("k").await.unwrap();
    assert!(server.exists("redlock:{k}"));
    guard.extend(secs(10)).await.unwrap();
    assert_eq!(guard.release().await, Ok(Released::Freed));
    assert!(!server.exists("redlock:{k}"));

    let refused = why_unreachable(with_pool(&url, &authority, None)).await;
    assert!(refused.contains("pool-0"), "{refused}");
}

#[tokio::test]
async fn tls_server_of_an_unknown_authority_is_refused_by_name_and_reason() {
    let server = RedisServer::start();
    let authority = Authority::new("we");
    let Some(url) = authority.serve_tls(&server, "no") else {
        return;
    };
    let by_pool = with_pool(&url, &Authority::new("another authority"), None);
    // The system's roots.
    let by_url = unguarded().url(&url);
    let address = url.trim_start_matches("rediss://");
    for (builder, node) in [(by_pool, "pool-0"), (by_url, address)] {
        let refused = why_unreachable(builder).await;
        for part in [
            &format!("{node} is unreachable"),
            "invalid peer certificate: UnknownIssuer",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
    }
}

/// A program that knows nothing of this authority. It has a crypto provider, because a build of the workspace gives it
/// that of these tests.
#[tokio::test]
async fn ssl_cert_file_adds_a_private_authority() {
    let server = RedisServer::start();
    let authority = Authority::new("we");
    let Some(url) = authority.serve_tls(&server, "no") else {
        return;
    };
    let file = Authority::file(&server);
    let envs = [
        ("REDLOCK_URLS", url.as_str()),
        ("REDLOCK_RESTART_GUARD", "off"),
        ("SSL_CERT_FILE", file.to_str().unwrap()),
    ];
    let mut process = ChildProcess::start(example_path("lock_without_http"), &["k", "1"], &envs);
    let status = process.wait(PATIENCE);
    assert_eq!(status.code(), Some(0), "{}", process.stderr());
}

/// The servers of a private authority, which only a process of its own can trust.
#[tokio::test]
async fn tls_carries_locks_subscriptions_and_records() {
    let server = RedisServer::start();
    let Some(url) = Authority::new("we").serve_tls(&server, "no") else {
        return;
    };
    let file = Authority::file(&server);
    let plain = server.url();
    let envs = [
        (URL, url.as_str()),
        (PLAIN_URL, plain.as_str()),
        ("SSL_CERT_FILE", file.to_str().unwrap()),
    ];
    let name = "process_that_trusts_the_authority";
    let test = ["--exact", name, "--nocapture"];
    let mut process = ChildProcess::start(env::current_exe().unwrap(), &test, &envs);
    let status = process.wait(4 * PATIENCE);
    assert!(status.success(), "{}", process.stderr());
    // A filter that no test has, and a test that does nothing, are successes too.
    let said = process.stdout();
    assert!(said.contains(DONE), "{said}");
}

/// Does nothing but in the process of the test above.
#[tokio::test]
async fn process_that_trusts_the_authority() {
    let Ok(url) = env::var(URL) else { return };
    let plain = env::var(PLAIN_URL).unwrap();
    use_every_connection(&plain, || unguarded().url(&url)).await;

    let by_name = url.replace("127.0.0.1", "localhost");
    let why = why_unreachable(unguarded().url(by_name)).await;
    assert!(
        why.contains("TLS handshake failed: invalid peer certificate"),
        "{why}"
    );
    // The server takes what it reads for the beginning of a long command, and waits for the rest.
    let why = why_unreachable(unguarded().url(plain.replace("redis://", "rediss://"))).await;
    assert!(why.contains("no connection within 1s"), "{why}");
    // The server closes the connection, sooner or later.
    why_unreachable(unguarded().url(url.replace("rediss://", "redis://"))).await;
    println!("{DONE}");
}

/// As the chapter has it.
fn with_pool(
    url: &str,
    authority: &Authority,
    client_tls: Option<ClientTlsConfig>,
) -> RedlockBuilder {
    let root_cert = Some(authority.certificate().into_bytes());
    let certificates = TlsCertificates {
        client_tls,
        root_cert,
    };
    let client = Client::build_with_tls(url, certificates).unwrap();
    let manager = Manager::new(client.get_connection_info().clone()).unwrap();
    let pool = Pool::builder(manager).max_size(1).build().unwrap();
    unguarded().pool(pool)
}

const URL: &str = "REDLOCK_TEST_TLS_URL";
const PLAIN_URL: &str = "REDLOCK_TEST_PLAIN_URL";
const DONE: &str = "all of it was tested";
const PATIENCE: Duration = secs(20);
