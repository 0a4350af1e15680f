#!/usr/bin/env bash
# Runs what threads share in many orders of their steps; src/node/sync.rs says how.
#
#   tests/schedules.sh                                  1,000 orders for each check
#   tests/schedules.sh 100000                           so many orders
#   tests/schedules.sh 1000 job::tests::schedules       the checks whose names contain this

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export SCHEDULES="${1:-1000}"
# All dependencies are compiled with the flag, too: beside those of other tests, and without what a debugger needs.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/schedules" CARGO_PROFILE_DEV_DEBUG=0
export RUSTFLAGS="${RUSTFLAGS:-} --cfg shuttle -D warnings"
cargo test -p tower-redlock --lib "${2:-schedules}"
