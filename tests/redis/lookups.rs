//! A host name whose address changes: each connection looks it up again, and another server behind it is quarantined.

use std::path::Path;
use std::process::Command;
use std::{env, fs, process};

use support::{ChildProcess, RedisServer, secs, until, until_all_up};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tower_redlock::NodeState;

use crate::patient::{LONGEST, guarded, name_of};

const URL: &str = "LOOKUPS_URL";
const FILE: &str = "LOOKUP_SHIM_FILE";

/// On threads of its own, because waiting for the process blocks one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_name_is_looked_up_at_each_connection() {
    if cfg!(not(target_os = "linux")) {
        support::not_run("look-ups: other systems preload libraries in other ways");
        return;
    }
    let (before, after) = (RedisServer::start(), RedisServer::start());
    // The port is in the URL, and stays.
    let elsewhere = TcpListener::bind(("127.0.0.2", before.port()))
        .await
        .unwrap();
    let upstream = after.addr();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = elsewhere.accept().await {
            tokio::spawn(async move {
                let mut server = TcpStream::connect(upstream).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    let file = env::temp_dir().join(format!("tower-redlock-lookup-{}", process::id()));
    fs::write(&file, "127.0.0.1").unwrap();
    let (library, url) = (shim(), format!("redis://moving.test:{}", before.port()));
    let envs = [
        ("LD_PRELOAD", &*library),
        (FILE, file.to_str().unwrap()),
        (URL, &url),
    ];
    let program = env::current_exe().unwrap();
    let test = ["--exact", "lookups::process_with_the_name", "--nocapture"];
    let mut child = ChildProcess::start(program, &test, &envs);
    child.wait_for_line("locked before", LONGEST);
    assert!(before.exists(&name_of("before")));

    fs::write(&file, "127.0.0.2").unwrap();
    assert!(
        !after.exists("redlock:generation"),
        "the open connection stays"
    );
    before.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    child.wait_for_line("quarantined", LONGEST);
    child.wait_for_line("locked after", LONGEST);
    assert!(after.exists(&name_of("after")) && !before.exists(&name_of("after")));
    let status = child.wait(LONGEST);
    assert!(status.success(), "{}", child.stderr());
    fs::remove_file(&file).unwrap();
}

/// Does nothing but in the process of the test above.
#[tokio::test]
async fn process_with_the_name() {
    let Ok(url) = env::var(URL) else { return };
    let redlock = guarded([url]).build().unwrap();
    until_all_up(&redlock, LONGEST).await;
    let before = redlock.try_lock("before").await.unwrap();
    println!("locked before");
    until("quarantined", LONGEST, || async {
        let state = &redlock.health().await.nodes[0].state;
        matches!(state, NodeState::Quarantined { .. })
    })
    .await;
    println!("quarantined");
    until_all_up(&redlock, LONGEST).await;
    let after = redlock.try_lock("after").await.unwrap();
    println!("locked after");
    before.lost().await;
    sleep(secs(1)).await;
    drop(after);
}

/// Builds the library that answers the look-ups, and returns its path.
fn shim() -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("support/lookup_shim.c");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lookup_shim.so");
    let built = Command::new("cc")
        .args(["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"])
        .arg("-o")
        .args([&library, &source])
        .output()
        .expect("Rust links with cc, so it is there");
    assert!(built.status.success(), "cc: {built:?}");
    library.to_str().unwrap().to_owned()
}
