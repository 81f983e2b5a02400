#!/usr/bin/env bash
# What an x86-64 machine needs to build and test for aarch64.
#
#   aarch64.sh test                  the Rust tests; prints which are not run, and why
#   aarch64.sh rustc                 prints the compiler that has aarch64's standard library
#   aarch64.sh cargo ARGS...         cargo with it and with zig as the C compiler, for the target aarch64-unknown-linux-gnu
#   aarch64.sh run COMMAND...        runs a command in an aarch64 root of Debian, emulated; this tree and /tmp are where they are here.
#                                    With PACKAGE=DIR, that folder is python/
#
# The compiler is rustup's, if it can add the target, and otherwise Debian's, which scripts/debian_packages.sh unpacks into
# .tools/aarch64 (DEBIAN_RUST=1 takes it in any case; it is that of RUST_SUITE, by default testing). The root is of SUITE, by default
# stable. `run` needs qemu-aarch64-static (Debian: qemu-user-static) and no rights: what it mounts and registers, in namespaces of
# its own, no other process sees.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
own=$root/.tools/aarch64
target=aarch64-unknown-linux-gnu
# What is in the root of the tests.
packages=(base-files bash ca-certificates coreutils findutils grep libc-bin procps sed python3 python3-venv)

fail() {
    echo "*** $*" >&2
    exit 2
}

# Debian's compiler with the C library and LLVM that it was built for, whatever this machine has.
debian_rust() {
    local at=$own/rust suite=${RUST_SUITE:-testing}
    if [ ! -e "$at/ready" ]; then
        echo "unpacking the compiler of Debian $suite into ${at#"$root"/}" >&2
        "$root/scripts/debian_packages.sh" "$suite" amd64 "$at" libstd-rust-dev -- rustc libstd-rust-dev:arm64 >&2
        cat >"$at/rustc" <<'RUSTC'
#!/bin/sh
at=$(dirname "$0")
exec "$at/lib64/ld-linux-x86-64.so.2" --library-path "$at/usr/lib/x86_64-linux-gnu" "$at/usr/bin/rustc" --sysroot "$at/usr" "$@"
RUSTC
        chmod +x "$at/rustc"
        touch "$at/ready"
    fi
    echo "$at/rustc"
}

rustc() {
    local found
    if [ -z "${DEBIAN_RUST:-}" ] && command -v rustup >/dev/null; then
        found=$(cd "$root" && rustup which rustc)
        if [ -d "$("$found" --print target-libdir --target $target)" ] ||
            (cd "$root" && rustup target add $target >/dev/null 2>&1); then
            echo "$found"
            return
        fi
        echo "rustup cannot add $target" >&2
    fi
    debian_rust
}

compilers() {
    local tool bin=$own/bin
    [ -x "$root/.venv-wheel/bin/maturin" ] || fail "there is no zig: run \`make .venv-wheel/ready\`"
    mkdir -p "$bin"
    for tool in cc ar; do
        local flags=
        [ $tool = ar ] || flags="-g -fno-sanitize=all -target aarch64-linux-gnu.2.28"
        cat >"$bin/$tool.new" <<TOOL
#!/bin/sh
PATH="$root/.venv-wheel/bin:\$PATH" exec maturin zig $tool -- $flags "\$@"
TOOL
        chmod +x "$bin/$tool.new"
        mv "$bin/$tool.new" "$bin/$tool"
    done
}

# Makes the root of $SUITE.
make_root() {
    local at=$own/$SUITE
    [ ! -e "$at/ready" ] || return 0
    echo "unpacking an aarch64 root of Debian $SUITE into ${at#"$root"/}" >&2
    "$root/scripts/debian_packages.sh" "$SUITE" arm64 "$at" "${packages[@]}" >&2
    # What scripts of the packages would make. pip does not start without certificates.
    ln -sf bash "$at/usr/bin/sh"
    mkdir -p "$at/etc/ssl/certs"
    cat "$at"/usr/share/ca-certificates/mozilla/*.crt >"$at/etc/ssl/certs/ca-certificates.crt"
    mkdir -p "$at$root" "$at/tmp" "$at/root" "$at/proc" "$at/dev"
    echo "root:x:0:0:root:/root:/bin/bash" >"$at/etc/passwd"
    echo "root:x:0:" >"$at/etc/group"
    echo "127.0.0.1 localhost" >"$at/etc/hosts"
    touch "$at/ready"
}

# In namespaces of its own: registers qemu as the interpreter of aarch64's programs, mounts what the root needs, and goes into it.
inside() {
    local at=$own/$SUITE misc=/proc/sys/fs/binfmt_misc qemu
    qemu=$(command -v "${QEMU:-qemu-aarch64-static}") || fail "there is no qemu-aarch64-static (Debian: qemu-user-static)"
    # Since Linux 6.7, a user namespace may have interpreters of its own. F opens qemu now, because it is not in the root.
    if mount -t binfmt_misc none $misc 2>/dev/null; then
        local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
        local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
        echo ":qemu-aarch64:M::$magic:$mask:$qemu:FP" >$misc/register
    elif ! grep -qs '^flags: .*F' $misc/qemu-aarch64; then
        fail "this kernel has no interpreter of aarch64's programs, and lets no user namespace have one (Linux 6.7 does): register" \
            "qemu-aarch64 in $misc, as Debian's qemu-user-static does at boot"
    fi
    mount --rbind /dev "$at/dev"
    mount -t tmpfs -o size=4g,mode=1777 tmpfs "$at/dev/shm"
    mount -t proc proc "$at/proc"
    mount --rbind /tmp "$at/tmp"
    mount --rbind "$root" "$at$root"
    if [ -n "${PACKAGE:-}" ]; then mount --bind "$PACKAGE" "$at$root/python"; fi
    exec env --unset=LD_LIBRARY_PATH PATH=/opt/windlass/bin:/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8 \
        chroot "$at" env --chdir="$PWD" "$@"
}

# Tests that are not run, each `name: reason`.
not_rust=(
    "cuda::nvtx::tests::a_profiler_sees_ranges_by_their_names: the root has no C compiler"
)

test_rust() {
    local each names=()
    for each in "${not_rust[@]}"; do
        echo "NOT RUN: $each" >&2
        names+=(--skip "${each%%: *}")
    done
    echo "NOT RUN: windlass-data/tests/it, windlass and the Python tests: not tried under qemu yet" >&2
    "$0" cargo test --locked --features windlass-data/conformance -p windlass-core -p windlass-data --no-fail-fast --lib \
        -- "${names[@]}"
    "$0" cargo test --locked --features windlass-data/conformance -p windlass-core -p windlass-data --test it -- \
        fuzz_corpus:: request_vectors::
}

export SUITE=${SUITE:-stable}
case ${1:-} in
rustc) rustc ;;
run)
    make_root
    exec unshare --user --map-root-user --mount --propagation private --pid --fork --kill-child "$0" inside "${@:2}"
    ;;
inside) inside "${@:2}" ;;
test)
    [ "$(uname -m)" != aarch64 ] || fail "this machine is aarch64: \`make test\` runs its tests"
    test_rust
    ;;
cargo)
    shift
    RUSTC=$(rustc)
    compilers
    export RUSTC CC_aarch64_unknown_linux_gnu=$own/bin/cc AR_aarch64_unknown_linux_gnu=$own/bin/ar
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$own/bin/cc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$root/scripts/aarch64.sh run"
    cd "$root"
    "$RUSTC" --version >&2
    exec "${CARGO:-cargo}" "$1" --target $target "${@:2}"
    ;;
*) fail "aarch64.sh test|rustc|cargo|run" ;;
esac
