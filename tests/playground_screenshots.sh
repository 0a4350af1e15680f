#!/usr/bin/env bash
# Takes the pictures of the playground in docs/images anew. Needs chromium and chromedriver.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cargo build --example playground
cargo run --quiet -p browser --bin screenshots -- docs/images
