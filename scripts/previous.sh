#!/usr/bin/env bash
# Builds the command of the previous release and prints where it is: `previous.sh [REV]`, by default the newest tag before this
# commit. It is checked out and built in target/previous, apart from this tree, and built once for each REV.
set -euo pipefail
cd "$(dirname "$0")/.."
# Until there is a tag: the last commit before stores had composed deltas and receivers a store to fall back to.
first=30309c1d
rev=${1:-$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null || echo $first)}
commit=$(git rev-parse --verify --quiet "$rev^{commit}") || {
    echo "*** there is no revision $rev here: fetch the history and the tags (git fetch --unshallow --tags)" >&2
    exit 2
}
place=target/previous binary=target/previous/windlass-$commit
if [ ! -x "$binary" ]; then
    # It reads the objects of this repository, also those of later commits.
    [ -d $place/src/.git ] || git clone --quiet --shared --no-checkout . $place/src
    git -C $place/src checkout --quiet --force --detach "$commit"
    CARGO_TARGET_DIR=$PWD/$place/target CARGO_PROFILE_DEV_DEBUG=0 "${CARGO:-cargo}" build --locked --bin windlass \
        --manifest-path $place/src/Cargo.toml >&2
    cp "$place/target/debug/windlass" "$binary.new"
    mv "$binary.new" "$binary"
fi
echo "$binary"
