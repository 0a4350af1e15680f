#!/usr/bin/env bash
# Rehearses a release: packages a clean clone of the last commit, unpacks that elsewhere, and uses it as a user does. The
# examples compile, where the crate is no dev-dependency of its own; the programs of the README work in a project that
# depends on the package; and the links and pictures of the README lead somewhere.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CARGO_INCREMENTAL=0
mkdir -p "${CARGO_TARGET_DIR:-target}"
CARGO_TARGET_DIR="$(cd "${CARGO_TARGET_DIR:-target}" && pwd)"
export CARGO_TARGET_DIR

main() {
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    git clone --quiet . "$work/clone"
    # The versions that all other checks use.
    [ ! -f Cargo.lock ] || cp Cargo.lock "$work/clone"
    # Not verified by cargo, which would build without the examples.
    (cd "$work/clone" && cargo package -p tower-redlock --no-verify --quiet --target-dir "$work")
    # Without the times of the archive, which are always the same: cargo would take changed files for unchanged.
    tar -xzmf "$work"/package/tower-redlock-*.crate -C "$work"
    package="$(echo "$work"/tower-redlock-*)"
    readme_leads_somewhere
    (
        cd "$package"
        # With the features that each example requires, and without those that an example must not need.
        cargo check --examples
        cargo check --examples --features json,test-util,unstable-protocol
    )
    TOWER_REDLOCK_PACKAGE="$package" TOWER_REDLOCK_NOT_RUN="$work/not_run" tests/getting_started.sh README.md
    [ ! -e "$work/not_run" ] || fail "the programs of the README did not run"
}

# The page of the registry resolves relative links against `repository`, and a reader of the package within it.
readme_leads_somewhere() {
    local links link view repository
    repository="$(sed -n 's/^repository = "\(.*\)"$/\1/p' "$package/Cargo.toml")"
    [ -n "$repository" ] || printf 'NOT RUN: links of the README in the repository: Cargo.toml has no address of it\n'
    links="$(grep -oE '(\]\(|^\[[^]]+\]: )[^)]+' "$package/README.md" | sed -E 's/.*(\]\(|\]: )//')"
    for link in $links; do
        case "$link" in
            https://*) continue ;;
            *.png | *.svg) view=raw ;;
            *) view=blob ;;
        esac
        [ -e "$package/${link%%#*}" ] || fail "the README links to $link, which the package lacks"
        [ -z "$repository" ] || curl -fsSL -o /dev/null "$repository/$view/HEAD/$link" \
            || fail "the README links to $link, which $repository lacks"
    done
}

fail() {
    printf 'tests/package.sh: %s\n' "$*" >&2
    exit 1
}

main
