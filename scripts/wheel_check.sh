#!/usr/bin/env bash
# Installs a wheel where nothing but Python is, and runs it: `wheel_check.sh [WHEEL]`, by default the newest in target/wheels.
# For each of SUITES (Debian's stable and the release before), debootstrap makes a root with python3 and python3-venv only; in
# it the wheel is installed in at most INSTALL_S seconds and runs `windlass doctor`, `windlass demo` and
# wheel_follow.py. Needs root and debootstrap. Packages come from where this machine's apt has Debian's, or from MIRROR=URL.
# ROOTS=DIR keeps the roots for the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "*** $*" >&2
    exit 2
}

if [ -z "${INSIDE:-}" ]; then
    [ "$(id -u)" = 0 ] || fail "wheel-check needs root, to make roots of Debian and to change into them: sudo make wheel-check"
    for tool in debootstrap unshare; do
        command -v $tool >/dev/null || fail "there is no $tool (Debian: apt-get install $tool)"
    done
    wheel=${1:-$(ls -t target/wheels/windlass-*.whl 2>/dev/null | sed -n 1p)}
    [ -f "$wheel" ] || fail "there is no wheel ${wheel:-in target/wheels}: \`make wheel\` makes one"
    mirror=${MIRROR:-$(apt-get indextargets 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' --format '$(REPO_URI)' \
        2>/dev/null | sed -n 1p)}
    [ -n "$mirror" ] || fail "this machine's apt has no Debian: name a mirror, as in MIRROR=URL make wheel-check"
    # What is mounted, runs and listens in there ends with this.
    export INSIDE=1 mirror
    exec unshare --mount --propagation private --pid --fork --kill-child "$0" "$wheel"
fi

wheel=$(realpath "$1")
roots=${ROOTS:-$(mktemp -d)}
[ -n "${ROOTS:-}" ] || trap 'umount --recursive --lazy "$roots"/*/proc "$roots"/*/dev/shm 2>/dev/null || true; rm -rf --one-file-system "$roots"' EXIT

for suite in ${SUITES:-stable oldstable}; do
    root=$roots/$suite
    echo "== $suite: making its root"
    if [ ! -e "$root/made" ]; then
        rm -rf "$root"
        mkdir -p "$root"
        debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$root" "$mirror" >"$roots/$suite.log" 2>&1 ||
            { tail -20 "$roots/$suite.log" >&2; fail "debootstrap of $suite from $mirror failed"; }
        touch "$root/made"
    fi
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o size=2g,mode=1777 tmpfs "$root/dev/shm"
    rm -rf "$root/opt/windlass"
    cp "$wheel" scripts/wheel_follow.py "$root/root/"
    env --ignore-environment PATH=/opt/windlass/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
        INSTALL_S="${INSTALL_S:-10}" WHEEL="$(basename "$wheel")" \
        chroot "$root" bash -euo pipefail <<'INSIDE'
cd /root
echo "== $(. /etc/os-release; echo "$PRETTY_NAME"), $(python3 --version), glibc $(ldd --version | sed -n '1s/.* //p')"
if command -v cc gcc cargo rustc; then echo "*** there is a compiler in this root" >&2; exit 1; fi
python3 -m venv /opt/windlass
start=${EPOCHREALTIME/./}
pip install --quiet --disable-pip-version-check --no-index "$WHEEL"
took=$(((${EPOCHREALTIME/./} - start) / 1000))
echo "== installed in $took ms"
[ $took -le $((INSTALL_S * 1000)) ] || { echo "*** installing took longer than $INSTALL_S s" >&2; exit 1; }
windlass --version
echo "== windlass doctor"
windlass doctor
echo "== windlass demo"
windlass demo --model-bytes 8Mi --steps 6 --pace 0.1
echo "== wheel_follow.py"
timeout 300 python wheel_follow.py
rm -f "$WHEEL" wheel_follow.py
INSIDE
    umount "$root/dev/shm" "$root/proc"
    echo "== $suite: passed"
done
