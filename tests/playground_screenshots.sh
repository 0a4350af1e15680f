#!/usr/bin/env bash
# Takes the pictures of the playground in docs/images anew. Needs chromium and chromedriver.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)"
cargo build --all-features --example playground
TOWER_REDLOCK_PLAYGROUND="$target/debug/examples/playground" CARGO_TARGET_DIR="$target/browser" \
    cargo run --quiet --manifest-path tests/browser/Cargo.toml --bin screenshots -- docs/images
