#!/usr/bin/env bash
# Does what the pages of the guide tell a reader to do, in an empty folder, and compares what they show.
#
#   tests/getting_started.sh [PAGE ...]    # default: docs/getting_started.md, the recipes, and the README
#
# It takes two minutes on two cores when nothing was compiled before, and one minute after that.
#
# In a page, a block of code below "Replace `FILE`:" becomes that file, and below "Append to `FILE`:" its end. A
# block of `sh` is typed into a terminal of its own. A block of `text` is what the commands above it print: all of
# it, but for numbers that differ each time. A line of prose with "Ctrl-C" stops what the page has started.
# This crate replaces the published one, and free ports those of the page. Of the README, each snippet becomes a program
# of a project with the dependencies that it names, which is compiled. The first one runs, and its commands get the
# statuses that their comments announce. `TOWER_REDLOCK_PACKAGE` may name another folder with the crate and its pages.

set -euo pipefail
root="${TOWER_REDLOCK_PACKAGE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"

main() {
    has_tools "the pages of the guide" cargo curl awk || return 0
    work="$(mktemp -d)"
    trap clean_up EXIT
    export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_TERM_COLOR=never RUST_BACKTRACE=0
    # No page shows these timeouts, and the servers run in sessions of their own, which may get no processor for longer
    # than the defaults where all other tests run beside.
    export REDLOCK_NODE_TIMEOUT=2s REDLOCK_CONNECT_TIMEOUT=10s
    CARGO_TARGET_DIR="$(cd "$root" && mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)/getting_started"
    export CARGO_TARGET_DIR
    if [ "$#" -eq 0 ]; then
        set -- "$FIRST" "${RECIPES[@]}" README.md
    fi
    local page
    for page in "$@"; do
        case "$page" in
            README.md) paste "$page" ;;
            *) follow "$page" ;;
        esac
    done
}

has_tools() {
    local what="$1" tool
    shift
    for tool in "$@"; do
        if ! command -v "$tool" >/dev/null; then
            not_run "$what: $tool is missing"
            return 1
        fi
    done
}

# Compiles each snippet as a program of its own, as if it were pasted into a new project, and tries the first.
paste() {
    local project="$work/pasted" started="$SECONDS" announced answered
    choose_ports
    steps="$work/readme"
    mkdir -p "$steps"
    mkdir -p "$project/src/bin"
    {
        printf 'Cargo.toml\n[package]\nname = "pasted"\nversion = "0.1.0"\nedition = "2024"\ndefault-run = "snippet_1"\n\n'
        awk '/^```toml$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$root/$1"
    } >"$work/manifest"
    write_file "$project" "$work/manifest" >"$project/Cargo.toml"
    # shellcheck disable=SC2086
    sed $replace_ports "$root/$1" | awk -v prefix="$project/src/bin/snippet_" '
        /^```rust/ { inside = 1; main = 0; file = prefix (++count) ".rs"; print "#![deny(warnings)]\n#![allow(dead_code)]" > file; next }
        inside && /^```$/ { inside = 0; if (!main) print "fn main() {}" > file; close(file); next }
        inside && /fn main\(/ { main = 1 }
        inside { print > file }
    '
    (cd "$project" && cargo build -q) \
        || fail "a snippet of $1 does not compile"
    printf 'cargo run\n' >"$steps/start.sh"
    printed="$steps/started"
    start_server "$project" "$steps/start.sh"
    printed="$steps/answers"
    steps_of "$1" >"$steps/list"
    type_in "$project" "$steps/README.01.sh"
    stop_servers
    announced="$(sed -n 's/.*# \([0-9]\{3\}\).*/\1/p' "$steps/README.01.sh" | sort)"
    answered="$(sed -n 's|^HTTP/1.1 \([0-9]*\).*|\1|p' "$printed" | sort)"
    [ -n "$answered" ] && [ "$announced" = "$answered" ] \
        || fail "the first program of $1 answered" $answered "and not" $announced
    say "$1: $(find "$project/src/bin" -name '*.rs' | wc -l | tr -d ' ') snippets in $((SECONDS - started)) s"
}

follow() {
    local page="$1" started="$SECONDS"
    has_tools "$page" redis-server || return 0
    steps="$work/$(basename "$page" .md)"
    mkdir -p "$steps/empty"
    printf '%s\n' "$steps/empty" >"$steps/folder"
    choose_ports
    only_build=
    if grep -q DATABASE_URL "$root/$page" && ! start_postgres; then
        not_run "the program of $page: PostgreSQL is missing"
        only_build=yes
    fi
    if [ "$page" != "$FIRST" ]; then
        # Its project is that of the first page.
        steps_of "$FIRST" | head -n 2 | while read -r step; do take "$step"; done
    fi
    steps_of "$page" >"$steps/list"
    [ -s "$steps/list" ] || fail "$page has no steps"
    local step previous=
    while read -r step; do
        take "$step"
    done <"$steps/list"
    stop_servers
    say "$page: $(wc -l <"$steps/list" | tr -d ' ') steps in $((SECONDS - started)) s"
}

# Writes the steps of a page into files and prints their names: NUMBER.KIND, in their order.
steps_of() {
    local prefix="$steps/$(basename "$1" .md)"
    # shellcheck disable=SC2086
    sed $replace_ports "$root/$1" | awk -v prefix="$prefix" '
        function begin(kind) { file = sprintf("%s.%02d.%s", prefix, ++count, kind); printf "" > file; print file }
        !inside && /^```/ {
            inside = 1; kind = substr($0, 4); file = ""
            if (target != "") { begin(mode); print target > file }
            else if (kind == "sh") begin("sh")
            else if (kind == "text") begin("text")
            target = ""
            next
        }
        inside && /^```/ { inside = 0; if (file != "") close(file); next }
        inside { if (file != "") print > file; next }
        /Ctrl-C/ { begin("stop"); close(file) }
        # The sentence may begin on an earlier line.
        { text = text " " $0 }
        /^$/ { text = "" }
        text ~ /(Replace|Append to) `[^`]*`[^`]*:$/ && /:$/ {
            mode = text ~ /Append to `[^`]*`[^`]*:$/ ? "append" : "replace"
            target = text; sub(/.*(Replace|Append to) `/, "", target); sub(/`.*/, "", target)
        }
        text ~ /(Replace|Append to) `[^`]*`\. .*:$/ {
            mode = text ~ /Append to `[^`]*`\./ ? "append" : "replace"
            target = text; sub(/.*(Replace|Append to) `/, "", target); sub(/`.*/, "", target)
        }
    '
}

take() {
    local step="$1" folder
    folder="$(cat "$steps/folder")"
    case "$step" in
        *.replace) write_file "$folder" "$step" >"$folder/$(head -n 1 "$step")" ;;
        *.append) write_file "$folder" "$step" >>"$folder/$(head -n 1 "$step")" ;;
        *.stop) stop_servers ;;
        *.text) [ -n "$only_build" ] || compare "$step" ;;
        *.sh)
            [ -z "$only_build" ] || sed -i.run 's/cargo run/cargo build/' "$step"
            printed="${step%.sh}.printed"
            if grep -q 'cargo run$' "$step"; then
                start_server "$folder" "$step"
            else
                type_in "$folder" "$step"
            fi
            ;;
    esac
}

# Without the first line, which is its name, and with this crate in place of the published one.
write_file() {
    local version
    version="$(sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' "$root/Cargo.toml" | head -n 1)"
    if grep -q '^tower-redlock' "$2"; then
        grep -q "^tower-redlock = \"$version\"" "$2" || fail "$2 does not depend on tower-redlock $version"
        # The versions that all other checks use.
        [ ! -f "$root/Cargo.lock" ] || cp "$root/Cargo.lock" "$1/Cargo.lock"
    fi
    sed -e 1d -e "s|^tower-redlock = .*|tower-redlock = { path = \"$root\" }|" "$2"
}

# One block of commands is one terminal, which begins in the folder in which the one before ended.
type_in() {
    printf '%s\npwd >"%s"\n' "$(cat "$2")" "$steps/folder" >"$2.typed"
    (cd "$1" && bash -eu "$2.typed" </dev/null >"$printed" 2>"$printed.errors") || {
        cat "$printed" "$printed.errors"
        fail "these commands failed: $(cat "$2")"
    }
}

start_server() {
    # One process, so that its id is that of the server in the end.
    sed 's/cargo run$/exec cargo run/' "$2" >"$2.typed"
    (cd "$1" && exec bash -eu "$2.typed" </dev/null >"$printed" 2>"$printed.errors") &
    servers="$servers $!"
    local left=3000
    until grep -q . "$printed" 2>/dev/null; do
        left=$((left - 1))
        kill -0 "$!" 2>/dev/null && [ "$left" -gt 0 ] || {
            cat "$printed.errors"
            fail "this printed nothing: $(cat "$2")"
        }
        sleep 0.1
    done
}

stop_servers() {
    local server
    for server in $servers; do
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    done
    servers=
}

compare() {
    masked <"$1" >"$1.expected"
    masked <"$printed" >"$1.printed"
    diff -B "$1.expected" "$1.printed" >"$1.diff" || {
        cat "$1.diff" "$printed"
        fail "$(basename "$1") shows (<) what was not printed (>)"
    }
}

# Fencing tokens, seconds that are left and durations differ each time.
masked() {
    sed -e 's/[0-9]\{16,\}/TOKEN/g' -e 's/another [0-9]* s/another N s/g' -e 's/finished in [0-9.]*s/finished in N s/'
}

# Other tests choose theirs above 20000 meanwhile: a server of theirs behind a name of the page would fail or forget.
choose_ports() {
    local port free taken=
    replace_ports=
    for port in 3000 3001 7001 7002 7003 5432; do
        free="$((10000 + RANDOM % 10000))"
        while [[ "$taken " = *" $free "* ]] || (: <"/dev/tcp/127.0.0.1/$free") 2>/dev/null; do
            free="$((10000 + RANDOM % 10000))"
        done
        taken="$taken $free"
        case "$port" in
            3*) replace_ports="$replace_ports -e s/:$port/:$free/g" ;;
            5*) database_port="$free" ;;
            *) replace_ports="$replace_ports -e s/$port/$free/g" ;;
        esac
    done
}

# A PostgreSQL server of its own, which refuses to run as root.
start_postgres() {
    local bin as_user=""
    for bin in $(dirname "$(command -v initdb || echo none)") /usr/lib/postgresql/*/bin; do
        [ -x "$bin/initdb" ] && [ -x "$bin/pg_ctl" ] && break
    done
    [ -x "$bin/pg_ctl" ] || return 1
    postgres="$work/postgres"
    mkdir -p "$postgres"
    if [ "$(id -u)" -eq 0 ]; then
        chmod 755 "$work"
        chown nobody "$postgres"
        as_user="setpriv --reuid=nobody --clear-groups"
    fi
    pg_ctl="$as_user $bin/pg_ctl -D $postgres/data -w -s"
    $as_user "$bin/initdb" -D "$postgres/data" -U postgres -A trust >/dev/null \
        && $pg_ctl -o "-p $database_port -k $postgres -c listen_addresses=127.0.0.1" -l "$postgres/log" start \
        || fail "PostgreSQL does not start: $(cat "$postgres/log")"
    export DATABASE_URL="host=127.0.0.1 port=$database_port user=postgres"
}

clean_up() {
    stop_servers
    [ -z "$postgres" ] || $pg_ctl -m immediate stop || true
    local file
    for file in "$work"/*/empty/*/redis-*.pid; do
        [ ! -f "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    done
    rm -rf "$work"
}

say() {
    printf 'tests/getting_started.sh: %s\n' "$*"
}

fail() {
    say "$*" >&2
    exit 1
}

not_run() {
    say "NOT RUN: $*" >&2
    [ -z "${TOWER_REDLOCK_NOT_RUN:-}" ] || printf 'NOT RUN: %s\n' "$*" >>"$TOWER_REDLOCK_NOT_RUN"
}

readonly FIRST=docs/getting_started.md
readonly RECIPES=(
    docs/recipes/one_withdrawal_at_a_time.md
    docs/recipes/nightly_job_once.md
    docs/recipes/webhook_delivered_twice.md
    docs/recipes/limit_per_tenant.md
    docs/recipes/who_blocks_me.md
    docs/recipes/fenced_writes_in_postgres.md
)
servers=
postgres=

main "$@"
