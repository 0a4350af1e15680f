//! The manifests of Kubernetes: what their schemas do not know.

use crate::read;

#[test]
fn nodes_differ_only_in_their_names() {
    let nodes = read("examples/kubernetes/nodes.yaml");
    let parts: Vec<&str> = nodes.split("---\n").skip(1).collect();
    let [a, b, c] = [0, 2, 4].map(|from| parts[from..from + 2].concat());
    for (node, letter) in [(b, "b"), (c, "c")] {
        let named = |text: &str, letter: &str| {
            text.replace(&format!("redlock-{letter}"), "NAME")
                .replace(&format!("node: {letter}"), "NAME")
        };
        assert_eq!(named(&a, "a"), named(&node, letter));
    }
    assert_eq!(parts.len(), 6);
}

/// The orchestrator counts the time before SIGTERM, too.
#[test]
fn pods_have_time_to_drain() {
    let service = read("examples/kubernetes/service.yaml");
    let number = |before: &str| {
        let (_, rest) = service.split_once(before).unwrap();
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap();
        digits.parse::<u64>().unwrap()
    };
    let grace = number("{name: GRACE_MS, value: \"");
    let all = number("\n      terminationGracePeriodSeconds: ");
    assert!(number("sleep: {seconds: ") + grace / 1000 < all);
}

#[test]
fn probes_are_routes_of_the_example() {
    let [service, example] = ["kubernetes/service.yaml", "graceful_shutdown.rs"]
        .map(|file| read(&format!("examples/{file}")));
    let paths = service.split("httpGet: {path: ").skip(1);
    let paths: Vec<&str> = paths.filter_map(|rest| rest.split(',').next()).collect();
    assert_eq!(paths, ["/readyz", "/livez"]);
    for path in paths {
        assert!(example.contains(&format!("(\"{path}\", ")), "{path}");
    }
}
