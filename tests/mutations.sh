#!/usr/bin/env bash
# Shows that the tests notice a change of the protocol, or of what threads share: applies each patch of tests/mutations
# to a copy of the tree and expects the tests of its group to fail there. To be run by hand; CI does not.
#
#   tests/mutations.sh                   all patches
#   tests/mutations.sh model             those of one group, which is a folder of tests/mutations
#   tests/mutations.sh model/exact_ack   one patch
#
# A patch may name the test that is to notice it, in a line "Test: <name>" of its head; then only that test runs.
# Builds go to the folder mutations of the target folder, with the output of each run in its logs/.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What a group runs, and what a test that noticed the change says. A test that fails otherwise does not
# count: the change may only have made it vacuous.
use_group() {
    case "$1" in
        model)
            # As they run, so that a run of some minutes ends with the first test that notices.
            command=(cargo test --release -p model --test model -- --nocapture)
            evidence='Unexpected "'
            ;;
        simulation)
            command=(cargo test --release -p simulation --test simulation)
            evidence=': violated: '
            ;;
        node)
            command=(cargo test -p tower-redlock --all-features --lib protocol::store::)
            evidence='panicked at '
            ;;
        chaos)
            command=(env CHAOS_SECONDS=10 cargo test -p tests --all-features --test proofs chaos::)
            evidence=': violated: '
            ;;
        schedules)
            command=(tests/schedules.sh)
            evidence='panicked at '
            ;;
        *) fail "tests/mutations.sh does not say what group $1 runs" ;;
    esac
}

main() {
    local names name
    names="$(select_patches "$@")"
    provide_target
    for name in $names; do
        check "$name" || missed="$missed $name"
    done
    [ -z "$missed" ] || fail "not as expected:$missed"
    say "every change was noticed"
}

# A group stands for its patches, after a run without any: where that fails, red would mean nothing.
select_patches() {
    local name patch found
    [ "$#" -gt 0 ] || set -- "$PATCHES"/*/
    for name in "$@"; do
        name="${name#"$PATCHES"/}"
        name="${name%/}"
        name="${name%.patch}"
        if [ -d "$PATCHES/$name" ]; then
            printf '%s/%s\n' "$name" "$UNCHANGED"
            for patch in "$PATCHES/$name"/*.patch; do
                found="${patch#"$PATCHES"/}"
                printf '%s\n' "${found%.patch}"
            done
        elif [ -f "$PATCHES/$name.patch" ]; then
            printf '%s\n' "$name"
        else
            fail "there is no group and no patch $name in $PATCHES"
        fi
    done
}

# Not the target folder itself: cargo takes a package of the same name at another place for the same,
# and would go on to use what was built from a changed copy.
provide_target() {
    target="${CARGO_TARGET_DIR:-target}/mutations"
    mkdir -p "$target/logs"
    target="$(cd "$target" && pwd -P)"
    tree="$target/tree"
    export CARGO_TARGET_DIR="$target" CARGO_TERM_COLOR=never
}

# Prints the verdict on one patch; fails unless it is the expected one.
check() {
    local name="$1" log passed=yes noticed others
    use_group "${name%%/*}"
    log="$target/logs/${name//\//_}.log"
    copy_tree || fail "cannot copy the tree to $tree"
    if [ "${name##*/}" != "$UNCHANGED" ] && ! apply "$PWD/$PATCHES/$name.patch"; then
        say "$name: does not apply"
        return 1
    fi
    [ "${name##*/}" = "$UNCHANGED" ] || name_the_test "$PATCHES/$name.patch"
    run_until_noticed || passed=no
    noticed="$(tests_that_noticed "$log")"
    others="$(failed_tests "$log" | without "$noticed" | joined)"
    if [ "${name##*/}" = "$UNCHANGED" ]; then
        say "$name: $([ "$passed" = yes ] && echo green || echo "red: see $log")"
        [ "$passed" = yes ]
    elif [ -n "$noticed" ]; then
        say "$name: red: $(head -n 1 <<<"$noticed" | cut -f 2), by $(cut -f 1 <<<"$noticed" | joined)${others:+; failed otherwise: $others}"
    elif [ "$passed" = yes ]; then
        say "$name: GREEN: ${command[*]} does not notice it"
        return 1
    else
        say "$name: red, but no test says what is violated${others:+; failed: $others}; see $log"
        return 1
    fi
}

# Adds the test that a patch names, if it does, to the command of its group.
name_the_test() {
    local test
    test="$(sed -n '/^diff /q; s/^Test: //p' "$1")"
    [ -z "$test" ] || command+=("$test")
}

# Runs the command of the group in the copy. What a test found ends it, where it is shown before the end.
run_until_noticed() {
    local pid ended=0
    # In a process group of its own, which ends with this script.
    set -m
    (cd "$tree" && exec "${command[@]}") >"$log" 2>&1 </dev/null &
    pid=$!
    set +m
    trap 'kill -- "-$pid" 2>/dev/null || true' EXIT
    trap 'exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        [ -z "$(tests_that_noticed "$log")" ] || kill -- "-$pid" 2>/dev/null || true
    done
    wait "$pid" 2>/dev/null || ended=$?
    trap - EXIT INT TERM
    return "$ended"
}

# Always at the same place, so that the dependencies are built once. Times are not kept: to cargo, an
# old file that comes back would not be news.
copy_tree() {
    rm -rf "$tree"
    mkdir -p "$tree"
    {
        git ls-files -z --cached --others --exclude-standard
        # Ignored, as in any library, but the copy shall use the same dependencies.
        [ ! -f Cargo.lock ] || printf 'Cargo.lock\0'
    } | tar --null -T - -cf - | tar -xmf - -C "$tree"
}

# Within a repository, git silently leaves out what a patch says of files outside of the folder.
apply() {
    (cd "$tree" && GIT_CEILING_DIRECTORIES="$target" git apply "$1")
}

# One line for each test: its name, a tab, and what it found violated.
tests_that_noticed() {
    awk -v evidence="$evidence" -v shown="${command[*]}" '
        /^---- .* stdout ----$/ { test = $2 }
        # While it runs, and its thread has the name of the test.
        shown ~ /--nocapture/ && /^thread .* panicked at / { split($0, of, "\047"); test = of[2] }
        test != "" && (at = index($0, evidence)) {
            print test "\t" substr($0, at + length(evidence))
            test = ""
        }
    ' "$1"
}

failed_tests() {
    sed -n 's/^---- \(.*\) stdout ----$/\1/p' "$1"
}

without() {
    local noticed
    noticed="$(cut -f 1 <<<"$1")"
    grep -vxF "${noticed:- }" || true
}

joined() {
    paste -s -d ',' - | sed 's/,/, /g'
}

say() {
    printf 'tests/mutations.sh: %s\n' "$*"
}

fail() {
    printf 'tests/mutations.sh: %s\n' "$*" >&2
    exit 1
}

readonly PATCHES=tests/mutations UNCHANGED=unchanged
missed=

main "$@"
