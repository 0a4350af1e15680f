#!/usr/bin/env bash
# Runs the tests on a fresh Debian, Ubuntu or macOS with Rust.
#
#   tests/run.sh                  all of them
#   tests/run.sh --provide        only installs what they need
#   tests/run.sh --model          the model and the simulation, which need nothing, in the time that others leave
#   tests/run.sh --others         all but these two
#   tests/run.sh -p tests lead    what `cargo test` runs with these arguments
#
# The tests start their own redis-server processes on ports of their own; what is missing for that
# is installed first, and curl, nghttp with h2load, and Chromium, if they can be. REDIS_SERVER and CHROMEDRIVER may name
# other binaries. Tests that could not run are named at the end.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

main() {
    command -v cargo >/dev/null || fail "cargo is missing: install Rust first"
    if [ "$*" = --model ]; then
        model
        return
    fi
    trap clean_up EXIT
    TOWER_REDLOCK_NOT_RUN="$(mktemp)"
    export TOWER_REDLOCK_NOT_RUN
    logs="$(mktemp -d)"
    provide_redis
    provide_http_clients
    provide_browser
    provide_other_clients
    [ "$*" != --provide ] || return 0
    # Most tests wait for servers for most of their time.
    export RUST_TEST_THREADS="${RUST_TEST_THREADS:-4}"
    case "$*" in
        "" | --others)
            test_workspace --no-run
            [ "$*" = --others ] || beside model
            # A minute of faults is a minute, whatever runs meanwhile.
            beside tests/getting_started.sh
            beside test_workspace --test proofs "$FAULTS"
            test_workspace --no-fail-fast -- --skip "$FAULTS"
            RUST_TEST_THREADS=2 test_workspace --test operators --test page --test tour
            join
            ;;
        *) test_workspace --no-fail-fast "$@" ;;
    esac
    say "all tests passed$([ ! -s "$TOWER_REDLOCK_NOT_RUN" ] || echo ", but for those that are named below")"
}

# Optimised, because they walk through millions of states.
model() {
    run env -u RUST_TEST_THREADS nice -n 19 cargo test --release -p model -p simulation --test model --test simulation
}

# Always with the same packages and features, because cargo would build their dependencies anew for others.
test_workspace() {
    run cargo test --workspace --exclude messages --all-features "$@"
}

run() {
    say "running: $*"
    "$@"
}

# Runs a command beside those that follow, until `join`, which prints what all of them printed.
beside() {
    say "running beside the next: $*"
    # With a process group of its own, so that its children end with it.
    set -m
    "$@" >"$logs/${#beside[@]}" 2>&1 </dev/null &
    beside+=("$!")
    set +m
}

join() {
    local number red=
    for number in "${!beside[@]}"; do
        wait "${beside[$number]}" || red=yes
        cat "$logs/$number"
    done
    beside=()
    [ -z "$red" ] || fail "a test failed; what it printed is above"
}

provide_redis() {
    local server="${REDIS_SERVER:-redis-server}"
    if ! command -v "$server" >/dev/null; then
        [ -z "${REDIS_SERVER:-}" ] || fail "REDIS_SERVER names $server, which is not there"
        if command -v apt-get >/dev/null; then
            install_with_apt redis-server \
                || fail "apt-get could not install redis-server; its own message is above"
            switch_service_off
        elif command -v brew >/dev/null; then
            say "installing redis with brew"
            brew install --quiet redis </dev/null
        else
            fail "redis-server is missing: install Redis $SMALLEST or later, then run this again"
        fi
        command -v "$server" >/dev/null || fail "redis was installed, but $server is not on the PATH"
    fi
    check_version "$server"
}

# Debian's packages start their services, and the tests use none. Debian's own switch against that is
# a policy script, which is ours only while there is no other.
install_with_apt() {
    local installed=yes
    say "installing $* with apt-get"
    as_root apt-get update -qq </dev/null || say "apt-get update failed, going on with the old lists"
    if [ ! -e "$POLICY" ]; then
        policy_is_ours=yes
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$POLICY" >/dev/null
        as_root chmod 755 "$POLICY"
    fi
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null || installed=no
    remove_policy
    [ "$installed" = yes ]
}

remove_policy() {
    [ -z "$policy_is_ours" ] || as_root rm -f "$POLICY"
    policy_is_ours=
}

switch_service_off() {
    if [ -d /run/systemd/system ]; then
        say "switching the system's redis-server service off, the tests do not use it"
        as_root systemctl disable --now --quiet redis-server.service 2>/dev/null || true
    fi
}

# The examples print curl lines, which their tests run, and other tests send odd HTTP with all three. Without them those say
# that they did not run.
provide_http_clients() {
    command -v curl >/dev/null && command -v nghttp >/dev/null && command -v h2load >/dev/null && return
    if command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null; }; then
        install_with_apt curl nghttp2-client || say "apt-get could not install curl and nghttp2-client"
    elif command -v brew >/dev/null; then
        brew install --quiet nghttp2 </dev/null || say "brew could not install nghttp2"
    else
        say "curl, nghttp or h2load is missing"
    fi
}

# The pages of the playground and of operators are tested in Chromium. Without it those tests say that they did not run.
provide_browser() {
    command -v "${CHROMEDRIVER:-chromedriver}" >/dev/null && return
    if [ -n "${CHROMEDRIVER:-}" ]; then
        say "CHROMEDRIVER names $CHROMEDRIVER, which is not there"
    elif command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null; }; then
        install_with_apt chromium chromium-driver || say "apt-get could not install chromium"
    elif command -v brew >/dev/null; then
        say "installing chromedriver with brew"
        [ -d "/Applications/Google Chrome.app" ] || brew install --quiet --cask google-chrome </dev/null \
            || say "brew could not install google-chrome"
        brew install --quiet --cask chromedriver </dev/null || say "brew could not install chromedriver"
    else
        say "chromedriver is missing"
    fi
}

check_version() {
    local version
    version="$("$1" --version | sed -n 's/.* v=\([0-9]*\.[0-9]*\).*/\1/p')"
    [ -n "$version" ] || fail "$1 --version does not tell a version"
    if [ "${version%.*}" -lt "${SMALLEST%.*}" ] \
        || { [ "${version%.*}" -eq "${SMALLEST%.*}" ] && [ "${version#*.}" -lt "${SMALLEST#*.}" ]; }; then
        fail "$1 is version $version, but the tests need Redis $SMALLEST or later: set REDIS_SERVER to a newer one"
    fi
    say "using $(command -v "$1"), version $version"
}

# Redlock clients of another language, against which one test checks ours. Node.js is not installed for
# it: its package brings hundreds of others.
provide_other_clients() {
    local clients=tests/other_clients
    if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
        say "node or npm is missing"
        return
    fi
    if [ -d "$clients/node_modules/redlock" ] && [ -d "$clients/node_modules/ioredis" ]; then
        say "using the npm packages in $clients/node_modules"
        return
    fi
    say "installing the npm packages redlock and ioredis into $clients/node_modules"
    (cd "$clients" && npm install --no-audit --no-fund --silent </dev/null) \
        || say "npm could not install its packages"
}

# At the end, also of a run that fails: what a test said that could not run, so that it is not taken for
# one that passed.
clean_up() {
    local number
    remove_policy
    for number in ${beside[@]+"${!beside[@]}"}; do
        kill -- "-${beside[$number]}" 2>/dev/null || true
        cat "$logs/$number"
    done
    [ -z "$logs" ] || rm -rf "$logs"
    [ -f "${TOWER_REDLOCK_NOT_RUN:-}" ] || return 0
    sort -u "$TOWER_REDLOCK_NOT_RUN" | while IFS= read -r line; do
        say "$line"
    done
    rm -f "$TOWER_REDLOCK_NOT_RUN"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        fail "redis-server is missing and installing it needs root or sudo: install it, then run this again"
    fi
}

say() {
    printf 'tests/run.sh: %s\n' "$*"
}

fail() {
    printf 'tests/run.sh: %s\n' "$*" >&2
    exit 1
}

readonly SMALLEST=6.2 POLICY=/usr/sbin/policy-rc.d
readonly FAULTS=chaos::faults::
policy_is_ours= logs= beside=()

main "$@"
