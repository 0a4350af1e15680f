#!/usr/bin/env bash
# Prints how many instructions one uncontended lock takes on five embedded nodes, fencing off and on, and over several
# groups of five; how many one request takes through a layer around a handler that answers at once, with how many of these
# are above those of its lock, and without those of the same request to the handler alone; and how many of this process a
# lock takes on five servers, of 64 tasks that lock at once, with how many of these are above those of a lock by hand in
# lanes (compare/batched.rs). The count does not depend on how busy the machine is, but on servers, where batches differ,
# by some hundredths; it needs valgrind.
#
#   benches/instructions.sh             1, 4, 16 and 64 groups
#   benches/instructions.sh 1 2         these numbers of groups

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Multiples of 64.
few=640 many=1920

main() {
    local program fencing groups lock request handler lanes
    [ $# -gt 0 ] || set -- 1 4 16 64
    program="$(cargo bench -p benches --bench instructions --no-run 2>&1 | tee /dev/stderr |
        sed -n 's/^ *Executable.*(\(.*\))$/\1/p')"
    for fencing in off on; do
        for groups in "$@"; do
            lock="$(instructions lock "$fencing" "$groups")"
            printf 'fencing %-3s  %2d groups: %d instructions per lock\n' "$fencing" "$groups" "$lock"
        done
        lock="$(instructions lock "$fencing" 1)"
        request="$(instructions layer "$fencing" 1)"
        handler="$(instructions handler "$fencing" 1)"
        printf 'fencing %-3s  layer: %d instructions per request, %d above its lock, %d without the handler\n' \
            "$fencing" "$request" $((request - lock)) $((request - lock - handler))
        lock="$(many=6400 instructions servers "$fencing" 1)"
        lanes="$(many=6400 instructions lanes "$fencing" 1)"
        printf 'fencing %-3s  servers: %d instructions per lock, %d above the lanes by hand\n' \
            "$fencing" "$lock" $((lock - lanes))
    done
}

# The difference of two runs, so that the start of the program does not count.
instructions() {
    echo $((($(count "$@" "$many") - $(count "$@" "$few")) / (many - few)))
}

count() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" "$@" 2>&1 |
        sed -n 's/^.*Collected : \([0-9]*\).*$/\1/p'
}

main "$@"
