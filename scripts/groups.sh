#!/usr/bin/env bash
# Runs groups of tests, each a target of the Makefile: `groups.sh LANE...`. A lane is a list of groups in one word; its groups
# run in turn, and lanes run at the same time, because tests of processes wait more than they compute. Every group
# runs, whatever the others do. Prints the output of a group when it ends, then a table of all groups. A few tests that failed
# run once more at the end, alone; those that pass then are named as flaky. STRICT=1 gives no second run.
set -euo pipefail
logs=$(mktemp -d)
trap 'rm -rf "$logs"; kill -- $(jobs -p) 2>/dev/null || true' EXIT

lane() {
    local group start code
    for group in $1; do
        echo "== $group: started"
        start=$SECONDS code=0
        "${MAKE:-make}" --no-print-directory "$group" >"$logs/$group" 2>&1 || code=$?
        # One group's output at a time.
        (
            flock 9
            echo "== $group: its output"
            cat "$logs/$group"
            echo "== $group: $([ $code = 0 ] && echo passed || echo FAILED) after $((SECONDS - start)) s"
        ) 9>"$logs/.lock"
        echo "$group $code $((SECONDS - start))" >>"$logs/.ended"
    done
}

start=$SECONDS
for groups in "$@"; do
    lane "$groups" &
done
wait

echo "== $((SECONDS - start)) s for all groups"
failed=()
while read -r group code seconds; do
    printf '%-10s %5s s  %s\n' "$group" "$seconds" "$([ "$code" = 0 ] && echo passed || echo FAILED)"
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
