//! URLs of nodes. The first line is what stands in front of the password, and the second what follows.
//!
//! No URL panics, and no error and no name of a node shows a password.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_redlock::fuzzing::node_name;
use tower_redlock_fuzz::first_line;

const PASSWORD: &str = "Xyzzy-7-Plugh";

fuzz_target!(|data: &[u8]| {
    let (before, after) = first_line(data);
    let [before, after] = [before, after].map(String::from_utf8_lossy);
    drop(node_name(&format!("{before}{after}")));
    drop(node_name(&before));
    let url = format!("redis://{before}:{PASSWORD}@{after}");
    // The password begins at the first colon, and ends at the last `@` in front of the host.
    let is_user = !before.contains([':', '/', '?', '#', '\\', '@', '\t', '\r']);
    // As a URL is read: without regard to these characters.
    let rest = format!("{before}{after}").replace(['\t', '\n', '\r'], "");
    let [password, rest] = [PASSWORD, &*rest].map(str::to_lowercase);
    if is_user && !rest.contains(&password) {
        let shown = match node_name(&url) {
            Ok(name) => name.to_string(),
            Err(why) => why,
        };
        assert!(!shown.to_lowercase().contains(&password), "{shown}");
    }
});
