#!/usr/bin/env bash
# Runs groups of tests, each a target of the Makefile: `groups.sh LANE...`. A lane is a list of groups in one word; its groups
# run in turn, and lanes run at the same time, because tests of processes wait more than they compute. Every group
# runs, whatever the others do. Prints the output of a group when it ends, then a table of all groups: how long each took,
# and the processor time of its processes. A few tests that failed run once more at the end, alone; those that pass then
# are named as flaky. STRICT=1 gives no second run.
set -euo pipefail
logs=$(mktemp -d)
trap 'rm -rf "$logs"; kill -- $(jobs -p) 2>/dev/null || true' EXIT

lane() {
    local group code TIMEFORMAT='%0R %0U %0S'
    for group in $1; do
        echo "== $group: started"
        code=0
        { time "${MAKE:-make}" --no-print-directory "$group" >"$logs/$group" 2>&1; } 2>"$logs/$group.time" || code=$?
        # One group's output at a time.
        (
            flock 9
            echo "== $group: its output"
            cat "$logs/$group"
            echo "== $group: $([ $code = 0 ] && echo passed || echo FAILED)"
        ) 9>"$logs/.lock"
        echo "$group $code $(cat "$logs/$group.time")" >>"$logs/.ended"
    done
}

start=$SECONDS
for groups in "$@"; do
    lane "$groups" &
done
wait

echo "== $((SECONDS - start)) s for all groups"
failed=()
while read -r group code seconds user system; do
    printf '%-10s %5s s  %s  %5s s of one core\n' "$group" "$seconds" \
        "$([ "$code" = 0 ] && echo passed || echo FAILED)" $((user + system))
    [ "$code" = 0 ] || failed+=("$group")
done <"$logs/.ended"
twice=()
for group in "${failed[@]}"; do
    { [ -z "${STRICT:-}" ] && "${PYTHON:-python3}" "$(dirname "$0")/again.py" "$group" "$logs/$group"; } || twice+=("$group")
done
if [ ${#twice[@]} -gt 0 ]; then
    echo "*** failed: ${twice[*]}; \`make GROUP\` runs one again" >&2
    exit 1
fi
