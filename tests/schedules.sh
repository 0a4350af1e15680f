#!/usr/bin/env bash
# Runs what threads share in many orders of their steps; src/node/sync.rs says how.
#
#   tests/schedules.sh                                  1,000 orders for each check
#   tests/schedules.sh 100000                           so many orders
#   tests/schedules.sh 1000 job::tests::schedules       the checks whose names contain this

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export SCHEDULES="${1:-1000}"
# Only the packages of the workspace get the flag. Their dependencies are those of the other tests, as long as the same
# packages are named as in tests/run.sh, but for two that only have tests of their own here. Cargo asks the script for its
# cfg, too, and so finds shuttle.
export RUSTC_WORKSPACE_WRAPPER="$PWD/tests/with_shuttle.sh"
cargo test --workspace --exclude messages --exclude histories --exclude support --all-features --lib "${2:-schedules}"
