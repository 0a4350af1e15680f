#!/usr/bin/env bash
# Counts the types and files on the path of one uncontended request:
#
#     benches/request_path.sh [--list] [--idempotent] [checkout]
#
# The request passes a `RedlockLayer`, or an `IdempotencyLayer` with `--idempotent`, in an axum router whose handler has no
# extractor, and locks one key on five Redis servers, which the script starts. Requests before it have opened all connections. A debug build keeps
# every function, so that valgrind sees each executed line of `src`, on every task of the runtime, from the call
# of the router to the answers of the last node to the release.
#
# * Files: those of `src` with an executed line.
# * Types: the structs, enums, traits and type aliases that `src` declares and that an executed function mentions
#   in its signature, on an executed line of its body, or in the head of its `impl`. Names are resolved through
#   imports and re-exports.
#
# `--list` prints both. An idempotent request is executed, and its response recorded. `checkout` is another working tree of this repository. It needs valgrind and redis-server.

set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
list=""
idempotent=""
[ "${1-}" != --list ] || { list=--list && shift; }
[ "${1-}" != --idempotent ] || { idempotent=--idempotent && shift; }
tree="$(cd "${1:-$here}" && pwd)"
work="$here/target/request_path"
servers=()

main() {
    mkdir -p "$work"
    trap stop_servers EXIT
    write_package
    cargo build --quiet --offline --manifest-path "$work/Cargo.toml" --target-dir "$work/target"
    start_servers
    observe $idempotent "${urls[@]}"
    "$work/target/debug/count" "$tree/src" "$work/callgrind.out" $list
}

# The programs belong to a package of their own, so that they can be built with the sources of any checkout.
write_package() {
    # The versions that this checkout has been built with, if it has been.
    [ ! -f "$here/Cargo.lock" ] || cp "$here/Cargo.lock" "$work/Cargo.lock"
    cat >"$work/Cargo.toml" <<EOF
[package]
name = "request-path"
version = "0.0.0"
edition = "2024"

[[bin]]
name = "request"
path = "$here/benches/request_path/request.rs"

[[bin]]
name = "count"
path = "$here/benches/request_path/count.rs"

[dependencies]
tower-redlock = { path = "$tree" }
axum = "0.8"
http = "1"
proc-macro2 = { version = "1", features = ["span-locations"] }
syn = { version = "2", default-features = false, features = ["full", "parsing", "visit"] }
tokio = { version = "1", features = ["full"] }
tower = { version = "0.5", features = ["util"] }

[workspace]
EOF
}

start_servers() {
    local index port
    urls=()
    for index in 1 2 3 4 5; do
        for port in $(shuf --input-range=20000-32000 --head-count=20); do
            ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
        done
        redis-server --port "$port" --bind 127.0.0.1 --save "" --appendonly no --dir "$work" >/dev/null &
        servers+=($!)
        urls+=("redis://127.0.0.1:$port")
    done
}

stop_servers() {
    [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null || true
}

observe() {
    valgrind --tool=callgrind --callgrind-out-file="$work/callgrind.out" --dump-instr=no --dump-line=yes \
        --compress-strings=no --compress-pos=no --collect-atstart=no --toggle-collect='*observed_request*' \
        "$work/target/debug/request" "$@" 2>"$work/valgrind.log" || { cat "$work/valgrind.log" >&2 && exit 1; }
}

main
