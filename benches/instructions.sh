#!/usr/bin/env bash
# Prints how many instructions one uncontended lock takes on five embedded nodes, fencing off and on.
# The count does not depend on how busy the machine is; it needs valgrind.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

few=500 many=1500

main() {
    local program fencing
    program="$(cargo bench -p benches --bench instructions --no-run 2>&1 | tee /dev/stderr |
        sed -n 's/^ *Executable.*(\(.*\))$/\1/p')"
    for fencing in off on; do
        # The difference of two runs, so that the start of the program does not count.
        printf 'fencing %s: %d instructions per lock\n' "$fencing" \
            $((($(count "$program" "$fencing" "$many") - $(count "$program" "$fencing" "$few")) / (many - few)))
    done
}

count() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$@" 2>&1 |
        sed -n 's/^.*Collected : \([0-9]*\).*$/\1/p'
}

main
