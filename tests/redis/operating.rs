//! The statements of the chapter on operating the nodes, on real servers: rights, TLS, one node, memory.

use futures_util::future::join_all;
use support::{
    Log, RedisServer, Reply, TTL, assert_matches, lock_and_release, ms, secs, until_all_up,
    use_all, wait_until,
};
use tower_redlock::deadpool_redis::{Hook, Manager, Pool};
use tower_redlock::{RedlockBuilder, RestartGuard};

use crate::patient::builder;
use crate::server_limits::used_memory;

fn unguarded() -> RedlockBuilder {
    builder([])
}

/// With the restart guard, because that needs rights too; short, so that the test is.
fn guarded() -> RedlockBuilder {
    builder([]).restart_guard(RestartGuard::For(secs(2)))
}

fn as_user(builder: RedlockBuilder, server: &RedisServer, user: &str) -> RedlockBuilder {
    builder.url(server.url().replace("://", &format!("://{user}:PASSWORD@")))
}

#[tokio::test]
async fn acl_of_the_chapter_is_sufficient_and_minimal() {
    let server = RedisServer::start();
    wait_until_it_may_vote(&server).await;
    let rule = acl_rule(&server);
    let rights = rule.iter().copied().filter(|word| word.starts_with('+'));
    let rights: Vec<&str> = rights.collect();
    assert!(rights.len() > 5, "{rule:?}");

    set_user(&server, "enough", &rule);
    server.command(&["ACL", "LOG", "RESET"]);
    let complaints = use_everything(&server, "enough").await;
    assert!(complaints.is_empty(), "{complaints:#?}");
    let denied = denied(&server);
    assert!(denied.is_empty(), "{denied:?}");

    let telling = ["+publish", "+pubsub|numsub", "+subscribe", "+unsubscribe"];
    for right in telling {
        let user = set_user_without(&server, &rule, right);
        server.command(&["ACL", "LOG", "RESET"]);
        let complaints = use_everything(&server, &user).await;
        assert!(complaints.is_empty(), "without {right}: {complaints:#?}");
        // Redis 6.2 names the command without its subcommand.
        let missed = |command: &String| {
            let rest = right[1..].strip_prefix(command.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('|'))
        };
        wait_until(&format!("in need of {right}"), secs(5), || {
            self::denied(&server).iter().any(missed)
        })
        .await;
    }

    let others = rights.into_iter().filter(|right| !telling.contains(right));
    let missed = others.map(async |right| {
        let user = set_user_without(&server, &rule, right);
        let complaints = use_everything(&server, &user).await;
        let node = server.addr().to_string();
        let helps = |complaint: &String| complaint.contains(&node) && complaint.contains(right);
        assert!(
            complaints.iter().any(helps),
            "without {right}: {complaints:#?}"
        );
    });
    join_all(missed).await;

    let mut others = rule.clone();
    for word in others.iter_mut().filter(|word| word.starts_with('~')) {
        *word = "~other:*";
    }
    set_user(&server, "other-keys", &others);
    let complaints = use_everything(&server, "other-keys").await;
    let helps = |complaint: &String| complaint.contains("on all keys of the namespace");
    assert!(complaints.iter().any(helps), "{complaints:#?}");
}

#[test]
fn acl_of_the_manifests_is_that_of_the_chapter_and_lets_probes_only_ping() {
    let users = SECRET
        .lines()
        .filter_map(|line| line.strip_prefix("    user "));
    let users = users.map(|line| line.split(' ').collect::<Vec<_>>());
    let users: Vec<_> = users.collect();
    let [["default", probes @ ..], ["locker", service @ ..]] = [&users[0][..], &users[1][..]]
    else {
        panic!("{users:?}");
    };
    let server = RedisServer::start();
    let mut rule = acl_rule(&server);
    // The nodes of the manifests are not in cluster mode.
    rule.retain(|word| *word != "+cluster|nodes");
    assert_eq!(service, rule);
    set_user(&server, "default", probes);
    assert_eq!(server.command(&["PING"]).as_str(), Some("PONG"));
    let refused = server.command(&["GET", "redlock:{k}"]);
    assert_matches!(refused, Reply::Error(_));
}

#[tokio::test]
async fn restart_guard_off_needs_no_info_and_time_only_for_readers_and_operators() {
    let server = RedisServer::start();
    let is_plain = !server.is_in_cluster_mode();
    let for_guard = |word: &&str| is_plain && *word == "+info" || *word == "+time";
    let mut rule = acl_rule(&server);
    rule.retain(|word| !for_guard(word));
    set_user(&server, "unguarded", &rule);
    let complaints = use_all(|| as_user(unguarded(), &server, "unguarded"), "k").await;
    let expected = ["read: ", "revoke: "];
    let is_expected = |complaint: &String| expected.iter().any(|it| complaint.starts_with(it));
    assert!(complaints.iter().all(is_expected), "{complaints:#?}");
    assert_eq!(complaints.len(), expected.len(), "{complaints:#?}");
}

#[tokio::test]
async fn server_that_evicts_forgets_a_held_lock_and_the_log_warns_of_it() {
    let limit = "--maxmemory 100mb --maxmemory-policy volatile-lru";
    let server = RedisServer::start_with_args(&limit.split(' ').collect::<Vec<_>>());
    let (log, _guard) = Log::subscribed();
    wait_until_it_may_vote(&server).await;
    let warning = "redlock node may evict locks and fences; set its maxmemory-policy to noeviction";
    assert!(log.text().contains(warning), "{}", log.text());
    let [ours, theirs] = [(); 2].map(|()| {
        let builder = guarded().ttl(TTL).renew(false);
        builder.urls([server.url()]).build().unwrap()
    });
    let first = ours.try_lock("k").await.unwrap();
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    wait_until("evicted", secs(5), || !server.exists("redlock:{k}")).await;
    server.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    let second = theirs.try_lock("k").await.unwrap();
    assert!(first.is_valid() && second.is_valid());
}

#[tokio::test]
async fn fence_takes_about_two_hundred_bytes_of_a_node() {
    let server = RedisServer::start();
    let redlock = unguarded().urls([server.url()]).build().unwrap();
    lock_and_release(&redlock, "warm").await;
    let before = used_memory(&server);
    let keys: Vec<String> = (0..FENCES).map(|i| format!("account:{i:013}")).collect();
    for some in keys.chunks(32) {
        let guard = redlock.lock_all(some.to_vec()).await.unwrap();
        guard.release().await.unwrap();
    }
    let name = "redlock:{account:0000000000000}:fence";
    assert!(server.exists(name));
    let bytes = (used_memory(&server) - before) / FENCES;
    println!(
        "{bytes} bytes for each fence with a name of {} bytes",
        name.len()
    );
    assert!((120..=260).contains(&bytes), "{bytes} bytes");
}

/// As rustls does when no crypto provider is installed.
#[tokio::test]
async fn panic_while_connecting_is_a_node_error_with_its_reason() {
    let server = RedisServer::start();
    let manager = Manager::new(server.url()).unwrap();
    let panics = Hook::sync_fn(|_, _| panic!("\nno provider;\ninstall one"));
    let pool = Pool::builder(manager).post_create(panics).build().unwrap();
    let redlock = unguarded().pool(pool).build().unwrap();
    for _ in 0..2 {
        let refused = redlock.try_lock("k").await.unwrap_err().to_string();
        let told = "pool-0 gives no votes: connecting panicked: no provider; install one";
        assert!(refused.contains(told), "{refused}");
        tokio::time::sleep(ms(10)).await;
    }
}

/// The words after the user's name in the chapter's `ACL SETUSER`, with the right that the chapter adds in cluster mode.
fn acl_rule(server: &RedisServer) -> Vec<&'static str> {
    let lines = CHAPTER.lines();
    let lines = lines.filter(|line| line.starts_with("ACL SETUSER "));
    let lines: Vec<&str> = lines.collect();
    let [line] = lines[..] else {
        panic!("one line begins with ACL SETUSER: {lines:?}");
    };
    let of_cluster = server.is_in_cluster_mode().then_some("+cluster|nodes");
    line.split(' ').skip(3).chain(of_cluster).collect()
}

/// Makes a user of its own for a rule without one right.
fn set_user_without(server: &RedisServer, rule: &[&str], right: &str) -> String {
    let words = rule.iter().copied();
    let rest: Vec<&str> = words.filter(|word| *word != right).collect();
    let user = right.replace(['+', '|'], "-");
    set_user(server, &user, &rest);
    user
}

fn set_user(server: &RedisServer, user: &str, rule: &[&str]) {
    let command = [&["ACL", "SETUSER", user], rule].concat();
    let reply = server.command(&command);
    assert_eq!(reply.as_str(), Some("OK"), "{command:?}: {reply:?}");
}

/// Returns the commands that the server denied.
fn denied(server: &RedisServer) -> Vec<String> {
    let log = server.command(&["ACL", "LOG"]);
    let object = |entry: &Reply| {
        let mut words = entry.as_array()?.iter().filter_map(Reply::as_str);
        words.find(|word| *word == "object")?;
        words.next().map(str::to_owned)
    };
    let entries = log.as_array().unwrap().iter();
    entries.map(|entry| object(entry).unwrap()).collect()
}

/// Waits until new clients need not wait.
async fn wait_until_it_may_vote(server: &RedisServer) {
    let redlock = guarded().ttl(TTL).urls([server.url()]).build().unwrap();
    until_all_up(&redlock, secs(10)).await;
}

/// Does all that there is to do as a user of the server, and returns what went wrong.
async fn use_everything(server: &RedisServer, user: &str) -> Vec<String> {
    use_all(|| as_user(guarded(), server, user), user).await
}

/// The chapter, so that it and these tests cannot drift apart.
const CHAPTER: &str = include_str!("../../docs/operating_the_nodes.md");

/// What the manifests of Kubernetes give the nodes.
const SECRET: &str = include_str!("../../examples/kubernetes/secret.yaml");

const FENCES: u64 = 10_000;
