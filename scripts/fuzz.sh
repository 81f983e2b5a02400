#!/usr/bin/env bash
# Fuzzing with libFuzzer on the pinned stable toolchain.
#
#   scripts/fuzz.sh run SECONDS [TARGET...]   fuzz; stops at the first failure, which stays in fuzz/artifacts/
#   scripts/fuzz.sh smoke                     replay the committed corpus and fuzz for two seconds each
#   scripts/fuzz.sh keep [TARGET...]          add to the committed corpus what the runs found, minimised
#
# Coverage comes from LLVM's pass, which stable rustc can run; sanitizers would need a nightly compiler, and
# they find little in code without `unsafe`. Debug assertions and overflow checks are on. New inputs are kept
# in fuzz/target/corpus/ until `keep`.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "fuzz: $*" >&2; exit 2; }

command=${1:-run}
shift || true
seconds=60
if [[ $command == run && $# -gt 0 ]]; then
    seconds=$1
    shift
fi
[[ $seconds =~ ^[0-9]+$ ]] || die "SECONDS must be a whole number, not '$seconds'"
mapfile -t known < <(sed -n 's/^name = "\([a-z_]*\)"$/\1/p' fuzz/Cargo.toml)
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=("${known[@]}")
for target in "${targets[@]}"; do
    [[ " ${known[*]} " == *" $target "* ]] || die "no target '$target'; there are: ${known[*]}"
done

command -v c++ >/dev/null || command -v "${CXX:-g++}" >/dev/null || {
    message="libFuzzer is written in C++ and there is no C++ compiler here; install g++."
    message+=" 'cargo test -p windlass-core --test it fuzz_corpus' replays the corpus without it"
    if [[ $command == smoke ]]; then echo "fuzz: skipped: $message"; exit 0; fi
    die "$message"
}

# Build scripts must not be instrumented, hence an explicit target.
host=$(rustc -vV | sed -n 's/^host: //p')
flags="--cfg fuzzing -Cpasses=sancov-module"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=" -Cllvm-args=-sanitizer-coverage-$option"
done
echo "fuzz: building ${known[*]} with $(rustc --version)"
RUSTFLAGS="$flags" cargo build --quiet --manifest-path fuzz/Cargo.toml --release --locked --target "$host"

for target in "${targets[@]}"; do
    binary=fuzz/target/$host/release/$target
    corpus=fuzz/corpus/$target
    found=fuzz/target/corpus/$target
    mkdir -p "$corpus" "$found" "fuzz/artifacts/$target"
    options=(-rss_limit_mb=1024 -timeout=10 "-artifact_prefix=fuzz/artifacts/$target/" -print_final_stats=1)
    [[ -f fuzz/dict/$target.dict ]] && options+=("-dict=fuzz/dict/$target.dict")
    log=fuzz/target/$target.log
    status=0
    case $command in
        run)
            echo "fuzz: $target for $seconds s"
            "$binary" "${options[@]}" "-max_total_time=$seconds" "$found" "$corpus" >"$log" 2>&1 || status=$?
            ;;
        smoke)
            "$binary" "${options[@]}" -runs=0 "$corpus" >"$log" 2>&1 || status=$?
            if [[ $status == 0 ]]; then
                "$binary" "${options[@]}" -max_total_time=2 "$found" "$corpus" >"$log" 2>&1 || status=$?
            fi
            ;;
        keep)
            # Edges only, not how often each was taken: a corpus for regressions should stay small.
            "$binary" "${options[@]}" -set_cover_merge=1 -use_counters=0 "$corpus" "$found" >"$log" 2>&1 || status=$?
            ;;
        *) die "unknown command '$command'; there are: run, smoke, keep" ;;
    esac
    if [[ $status != 0 ]]; then
        tail -n 40 "$log" >&2
        die "$target failed; mend it, and keep the input from fuzz/artifacts/$target/ in $corpus as a regression"
    fi
    executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    echo "fuzz: $target: ${executed:-0} inputs, no failure; $(find "$corpus" -type f | wc -l) in the corpus," \
        "$(cat "$corpus"/* 2>/dev/null | wc -c) bytes"
done
