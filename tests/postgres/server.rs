//! A PostgreSQL server of one test: in a folder of its own, reached by a Unix socket in that folder.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User, geteuid};
use tokio_postgres::{Client, Config, NoTls};

use crate::not_run::not_run;

/// A running server; stopped and deleted when dropped.
pub(crate) struct Server {
    process: Child,
    folder: PathBuf,
}

impl Server {
    /// Starts a server; `None`, and a line that says so, if PostgreSQL is not installed.
    pub(crate) fn start() -> Option<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let Some(programs) = programs() else {
            not_run("fenced writes on PostgreSQL: initdb and postgres are missing");
            return None;
        };
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("tower-redlock-pg-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        let user = other_user();
        if let Some(user) = &user {
            let (uid, gid) = (user.uid.as_raw(), user.gid.as_raw());
            chown(&folder, Some(uid), Some(gid)).unwrap();
        }
        let command = |program: &str| {
            let mut command = Command::new(programs.join(program));
            command.current_dir(&folder).stdin(Stdio::null());
            command.stdout(Stdio::null());
            if let Some(user) = &user {
                command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
            }
            command
        };
        let data = folder.join("data");
        let mut made = command("initdb");
        made.args(["--username=postgres", "--auth=trust", "--no-sync"]);
        made.args(["--encoding=UTF8", "--locale=C"]);
        let made = made.arg("--pgdata").arg(&data).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let mut process = command("postgres");
        process.arg("-D").arg(&data).arg("-k").arg(&folder);
        // No TCP, so that no port can be taken; without fsync, because nothing is to be kept.
        process.args(["-c", "listen_addresses=", "-F"]);
        let log = fs::File::create(folder.join("log")).unwrap();
        let process = process.stderr(log).spawn().unwrap();
        Some(Self { process, folder })
    }

    /// Connects, as soon as the server accepts connections.
    pub(crate) async fn connect(&self) -> Client {
        let mut config = Config::new();
        config.host_path(&self.folder).user("postgres");
        let connecting = async {
            loop {
                match config.connect(NoTls).await {
                    Ok(connected) => return connected,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let connected = tokio::time::timeout(LONGEST, connecting).await;
        let (client, connection) = connected.unwrap_or_else(|_| {
            let log = fs::read_to_string(self.folder.join("log"));
            panic!("no connection within {LONGEST:?}: {log:?}");
        });
        tokio::spawn(connection);
        client
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Without waiting for its clients.
        let pid = i32::try_from(self.process.id()).unwrap();
        kill(Pid::from_raw(pid), Signal::SIGQUIT).ok();
        self.process.wait().ok();
        fs::remove_dir_all(&self.folder).ok();
    }
}

/// Returns the folder of the programs of PostgreSQL: in the `PATH`, or the newest where Debian and Homebrew put them.
fn programs() -> Option<PathBuf> {
    let mut elsewhere = Vec::new();
    for parent in ["/usr/lib/postgresql", "/opt/homebrew/opt", "/usr/local/opt"] {
        let versions = fs::read_dir(parent).into_iter().flatten().flatten();
        elsewhere.extend(versions.map(|version| version.path().join("bin")));
    }
    elsewhere.sort_by_key(|folder| Reverse(version_of(folder)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&path).chain(elsewhere);
    folders.find(|folder| {
        let mut programs = ["initdb", "postgres"].iter();
        programs.all(|program| folder.join(program).is_file())
    })
}

/// Returns the version in a folder's name: `15` of `/usr/lib/postgresql/15/bin` and of `postgresql@15`.
fn version_of(folder: &Path) -> Option<u32> {
    let name = folder
        .parent()
        .and_then(Path::file_name)
        .and_then(OsStr::to_str)?;
    name.trim_start_matches("postgresql@").parse().ok()
}

/// Returns the user to run as if this is root, as whom PostgreSQL refuses to run.
fn other_user() -> Option<User> {
    if !geteuid().is_root() {
        return None;
    }
    let nobody = User::from_name("nobody").unwrap();
    Some(nobody.expect("root can run a server as the user `nobody`"))
}

const LONGEST: Duration = Duration::from_secs(30);
