#!/usr/bin/env bash
# Installs a wheel where nothing but Python is, and runs it: `wheel_check.sh [WHEEL]`, by default the newest in target/wheels.
# For each of SUITES (Debian's stable and the release before), debootstrap makes a root with python3 and python3-venv only; in
# it the wheel is installed in at most INSTALL_S seconds and runs `windlass doctor`, `windlass demo` and
# wheel_follow.py. Needs root and debootstrap. Packages come from where this machine's apt has Debian's, or from MIRROR=URL.
# ROOTS=DIR keeps the roots for the next run. ARCH=aarch64 on another machine takes the roots of scripts/aarch64.sh, under qemu,
# which needs no root.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=${ARCH:-$(uname -m)}

fail() {
    echo "*** $*" >&2
    exit 2
}

# What runs in a root.
check() {
    cat <<'INSIDE'
cd /root
rm -rf /opt/windlass
echo "== $(uname -m), $(. /etc/os-release; echo "$PRETTY_NAME"), $(python3 --version), glibc $(ldd --version | sed -n '1s/.* //p')"
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
windlass demo ${DEMO:---model-bytes 8Mi --steps 6 --pace 0.1}
echo "== wheel_follow.py"
timeout 300 python "$FOLLOW"
INSIDE
}

if [ -z "${INSIDE:-}" ]; then
    wheel=${1:-$(ls -t target/wheels/windlass-*_"$arch".whl 2>/dev/null | sed -n 1p)}
    [ -f "$wheel" ] || fail "there is no wheel ${wheel:-in target/wheels}: \`make wheel ARCH=$arch\` makes one"
    if [ "$arch" != "$(uname -m)" ]; then
        for suite in ${SUITES:-stable oldstable}; do
            echo "== $suite of $arch"
            check | SUITE=$suite INSTALL_S=${INSTALL_S:-60} DEMO=${DEMO---model-bytes 1Mi --steps 3 --pace 1} WHEEL=$(realpath "$wheel") \
                FOLLOW=$PWD/scripts/wheel_follow.py "scripts/$arch.sh" run bash -euo pipefail
            echo "== $suite of $arch: passed"
        done
        exit
    fi
    [ "$(id -u)" = 0 ] || fail "wheel-check needs root, to make roots of Debian and to change into them: sudo make wheel-check"
    for tool in debootstrap unshare; do
        command -v $tool >/dev/null || fail "there is no $tool (Debian: apt-get install $tool)"
    done
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
    cp "$wheel" scripts/wheel_follow.py "$root/root/"
    env --ignore-environment PATH=/opt/windlass/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
        INSTALL_S="${INSTALL_S:-10}" WHEEL="/root/$(basename "$wheel")" FOLLOW=/root/wheel_follow.py \
        chroot "$root" bash -euo pipefail < <(check)
    rm -f "$root/root/$(basename "$wheel")" "$root/root/wheel_follow.py"
    umount "$root/dev/shm" "$root/proc"
    echo "== $suite: passed"
done
