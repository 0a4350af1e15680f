#!/usr/bin/env bash
# Checks that the examples compile from the package, where the crate is no dev-dependency of its own.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CARGO_INCREMENTAL=0
mkdir -p "${CARGO_TARGET_DIR:-target}"
target="$(cd "${CARGO_TARGET_DIR:-target}" && pwd)"

main() {
    local package
    rm -rf "$target"/package/tower-redlock-*
    # Not verified by cargo, which would build without the examples.
    cargo package -p tower-redlock --allow-dirty --no-verify --quiet
    package="$(tar -tzf "$target"/package/tower-redlock-*.crate | sed -n '1s,/.*,,p')"
    # Without the times of the archive, which are always the same: cargo would take changed files for unchanged.
    tar -xzmf "$target/package/$package.crate" -C "$target/package"
    cd "$target/package/$package"
    # Or cargo would take it for a lost member of the workspace above.
    printf '\n[workspace]\n' >>Cargo.toml
    # With the features that each example requires, and without those that an example must not need.
    CARGO_TARGET_DIR="$target" cargo check --examples
    CARGO_TARGET_DIR="$target" cargo check --examples --features json,test-util,unstable-protocol
}

main
