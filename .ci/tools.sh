# Sourced by the scripts of this folder, in the root of the repository: steps with names, and tools of pinned versions.
# `TOWER_REDLOCK_TOOLS` may name another folder for the tools.

export CARGO_INCREMENTAL=0 CARGO_TERM_COLOR=never
mkdir -p "${CARGO_TARGET_DIR:-target}"
TARGET="$(cd "${CARGO_TARGET_DIR:-target}" && pwd)"
TOOLS="${TOWER_REDLOCK_TOOLS:-$TARGET/tools}"
PUBLIC_API=tests/public_api.txt
known= red= goes_on= by_name= unnamed= times= beside=

# `step NAME COMMAND…` runs the command, unless the script was called with the names of other steps. Steps may share a
# name. The first one that fails ends a script that does not set `goes_on`. After `by_name=yes`, steps run only if they
# are named.
step() {
    local name="$1" began="$SECONDS"
    is_wanted "$name" || return 0
    shift
    printf '\n==> %s: %s\n' "$name" "$*"
    # `set -e` would not hold within a command whose status is looked at in an `if`.
    set +e
    (
        set -e
        "$@"
    )
    [ "$?" -eq 0 ] || red+=" $name"
    set -e
    times+="$(printf '%5d s  %s' "$((SECONDS - began))" "$name")"$'\n'
    [ -z "$red" ] || [ -n "$goes_on" ] || fail "failed:$red"
}

# `step_beside NAME COMMAND…` is a step that runs while the next ones do, at most one in a script. What it prints comes last.
step_beside() {
    is_wanted "$1" || return 0
    beside="$1"
    shift
    printf '\n==> %s, beside the next steps: %s\n' "$beside" "$*"
    # With a process group of its own, so that its children end with it.
    set -m
    (
        trap 'echo "$SECONDS" >"$TARGET/$beside.seconds"' EXIT
        SECONDS=0
        "$@"
    ) >"$TARGET/$beside.log" 2>&1 &
    set +m
    trap 'kill -- "-$!" 2>/dev/null || true' EXIT
}

is_wanted() {
    known+=" $1"
    if [ "${#wanted[@]}" -eq 0 ] && [ -n "$by_name" ]; then
        unnamed+=" $1"
        return 1
    fi
    [ "${#wanted[@]}" -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]
}

# After the last step: how long each took. A name that no step has would otherwise count as passed.
passed() {
    local name
    if [ -n "$beside" ]; then
        wait "$!" || red+=" $beside"
        printf '\n==> %s printed:\n' "$beside"
        cat "$TARGET/$beside.log"
        times+="$(printf '%5d s  %s' "$(cat "$TARGET/$beside.seconds")" "$beside")"$'\n'
    fi
    for name in ${wanted[@]+"${wanted[@]}"}; do
        [[ "$known " == *" $name "* ]] || fail "there is no step $name, only:$known"
    done
    [ -z "$red" ] || fail "failed:$red"
    printf '\n%s' "$times"
    [ -z "$unnamed" ] || not_run "by name only: $0$unnamed"
    printf '\n%s: %s passed\n' "$0" "$([ "${#wanted[@]}" -eq 0 ] && echo "all checks" || echo "${wanted[*]}")"
}

# `tool NAME VERSION` installs a tool into the target folder, unless this version is there. Without optimisation and
# debug information, because each runs for seconds and compiles for minutes. Cargo builds it in a temporary folder.
tool() {
    env -u CARGO_TARGET_DIR CARGO_PROFILE_DEV_DEBUG=0 \
        cargo install --quiet --locked --debug --root "$TOOLS" --bins "$1@=$2" \
        || fail "$1 $2 cannot be installed"
}

# `tool_chain CHANNEL CHECK` fails if this tool chain is not there and rustup cannot install it, and says that the check
# does not run.
tool_chain() {
    cargo "+$1" --version >/dev/null 2>&1 && return
    rustup toolchain install "$1" --profile minimal --no-self-update && return
    not_run "$2: the tool chain $1 is missing, and rustup could not install it"
    return 1
}

not_run() {
    printf 'NOT RUN: %s\n' "$*"
}

fail() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 1
}
