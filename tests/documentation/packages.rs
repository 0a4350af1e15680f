//! The packages of the workspace, and the programs that commands find in them.

use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use crate::root;

static METADATA: LazyLock<Value> = LazyLock::new(|| {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "metadata",
        "--no-deps",
        "--offline",
        "--format-version",
        "1",
    ]);
    let output = cargo.current_dir(root()).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
});

pub(crate) fn all() -> &'static [Value] {
    METADATA["packages"].as_array().unwrap()
}

/// Returns the packages that a command with these words is about.
pub(crate) fn selected(words: &[&str]) -> Vec<&'static Value> {
    let mut packages = Vec::from_iter(all());
    if words.contains(&"-p") {
        let is_named = |name: &Value| {
            words
                .windows(2)
                .any(|pair| pair[0] == "-p" && name == pair[1])
        };
        packages.retain(|package| is_named(&package["name"]));
    } else if !words.contains(&"--workspace") {
        let default = METADATA["workspace_default_members"].as_array().unwrap();
        packages.retain(|package| default.contains(&package["id"]));
    }
    packages
}

/// Whether a package has this program: `example`, `bench` or `test`.
pub(crate) fn has(package: &Value, kind: &str, name: &str) -> bool {
    let mut targets = package["targets"].as_array().unwrap().iter();
    targets.any(|target| target["name"] == name && target["kind"][0] == kind)
}

pub(crate) fn is_feature(name: &str) -> bool {
    let mut packages = all().iter();
    packages.any(|package| {
        package["name"] == "tower-redlock" && package["features"].get(name).is_some()
    })
}

#[test]
fn every_folder_of_tests_with_a_program_belongs_to_a_package() {
    let files = crate::files("tests");
    let programs = files
        .iter()
        .filter_map(|path| path.strip_prefix("tests/")?.strip_suffix("/main.rs"));
    let programs: Vec<&str> = programs.filter(|name| !name.contains('/')).collect();
    assert!(programs.len() > 10, "{programs:?}");
    for name in programs {
        let is_found = all().iter().any(|package| has(package, "test", name));
        assert!(is_found, "tests/{name}/main.rs is in no Cargo.toml");
    }
}
