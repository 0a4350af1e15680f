//! URLs of nodes. The first line is what stands in front of the password, and the second what follows.
//!
//! No URL panics, and no error shows a password, nor does a builder.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_redlock::Redlock;
use tower_redlock_fuzz::first_line;

const PASSWORD: &str = "Xyzzy-7-Plugh";

fuzz_target!(|data: &[u8]| {
    let (before, after) = first_line(data);
    let [before, after] = [before, after].map(String::from_utf8_lossy);
    drop(shown(&format!("{before}{after}")));
    drop(shown(&before));
    let url = format!("redis://{before}:{PASSWORD}@{after}");
    // The password begins at the first colon, and ends at the last `@` in front of the host.
    let is_user = !before.contains([':', '/', '?', '#', '\\', '@', '\t', '\r']);
    // As a URL is read: without regard to these characters.
    let rest = format!("{before}{after}").replace(['\t', '\n', '\r'], "");
    let [password, rest] = [PASSWORD, &*rest].map(str::to_lowercase);
    if is_user && !rest.contains(&password) {
        let shown = shown(&url);
        assert!(!shown.to_lowercase().contains(&password), "{shown}");
    }
});

/// Returns what is shown of a URL: the name of its node, and the error if it is not usable.
fn shown(url: &str) -> String {
    let builder = Redlock::builder().url(url);
    let name = format!("{builder:?}");
    match builder.build() {
        Ok(redlock) => format!("{name} {redlock:?}"),
        Err(why) => format!("{name} {why} {why:?}"),
    }
}
