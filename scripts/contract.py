"""The contract check: docs/contract.md lists every row once, and the tests it names exist.

    scripts/contract.py               check; exit status 1 and one line per fault
    scripts/contract.py --self-test   show that the check itself can fail

A row is `| C12 | what | `test_name`, `module::test_name` |`, or `not yet` in the last cell. A row that is only
partly built says after its tests what it lacks: `` `test_name`; still missing: the socket``. A name stands for
a Rust test (a function under `#[test]`, also inside `proptest!`) or for a pytest function. A test under
`#[ignore]` is not run with the others, so it proves nothing and does not count. With a module before it, the
test must be in a file or folder of that name.
"""

import pathlib
import re
import sys

from rust_source import ROOT, files, strip

ROWS = 98
TABLE = ROOT / "docs/contract.md"

_ROW = re.compile(r"^\|\s*C(\d+)\s*\|(.*)\|(.*)\|\s*$")
_PROOF = re.compile(r"(?P<names>`[^`]+`(?:, `[^`]+`)*)(?P<partly>; still missing:(?P<lacks>.*))?")
_RUST_FN = re.compile(
    r"(?P<attributes>(?:#\[[^\]]*\]\s*)+)(?:pub(?:\([^)]*\))?\s+)?(?:async\s+)?fn\s+(?P<name>\w+)"
)
_TEST = re.compile(r"#\[(?:\w+::)*test(?:\([^\]]*\))?\]")
_IGNORE = re.compile(r"#\[\s*(?:ignore\b|cfg_attr\b[^\]]*\bignore\b)")
_PYTHON_TEST = re.compile(r"^\s*(?:async\s+)?def\s+(test_\w+)", re.MULTILINE)


def rust_tests(source: str) -> list[str]:
    """The tests that `cargo test` runs."""
    functions = _RUST_FN.finditer(strip(source))
    return [f["name"] for f in functions if _TEST.search(f["attributes"]) and not _IGNORE.search(f["attributes"])]


def find_tests() -> dict[str, list[pathlib.Path]]:
    """Test name -> files that define it, relative to the root."""
    tests: dict[str, list[pathlib.Path]] = {}
    for suffix, names in [(".rs", rust_tests), (".py", _PYTHON_TEST.findall)]:
        for path in files(suffix):
            for name in names(path.read_text()):
                tests.setdefault(name, []).append(path.relative_to(ROOT))
    return tests


def check(table: str, tests: dict[str, list[pathlib.Path]]) -> tuple[list[str], int, int]:
    """Faults, how many rows are proved, and how many partly."""
    faults: list[str] = []
    seen: dict[int, int] = {}
    proved = partly = 0
    for line in table.splitlines():
        if not (match := _ROW.match(line)):
            if re.match(r"^\|\s*C\d", line):
                faults.append(f"malformed row, expected three cells: {line}")
            continue
        number, what, proof = int(match[1]), match[2].strip(), match[3].strip()
        seen[number] = seen.get(number, 0) + 1
        if not what:
            faults.append(f"C{number}: says nothing")
        if proof == "not yet":
            continue
        if not (cell := _PROOF.fullmatch(proof)):
            faults.append(f"C{number}: write `name`, `name`, then perhaps ; still missing: what, or only: not yet")
            continue
        if cell["partly"] and not cell["lacks"].strip():
            faults.append(f"C{number}: does not say what is still missing")
        proved += not cell["partly"]
        partly += bool(cell["partly"])
        names = re.findall(r"`([^`]*)`", cell["names"])
        faults += [f"C{number}: {fault}" for name in names if (fault := missing(name, tests))]
    for number in range(1, ROWS + 1):
        if seen.get(number, 0) != 1:
            faults.append(f"C{number}: {'missing' if number not in seen else 'listed more than once'}")
    faults += [f"C{number}: there is no such row" for number in sorted(seen) if not 1 <= number <= ROWS]
    return faults, proved, partly


def missing(name: str, tests: dict[str, list[pathlib.Path]]) -> str | None:
    """What is wrong with a test's name, if anything."""
    *modules, test = name.split("::")
    found = [path for path in tests.get(test, []) if all(m in path.with_suffix("").parts for m in modules)]
    if not found:
        return f"no test is called `{name}`"
    if len(found) > 1:
        return f"`{name}` is the name of several tests ({', '.join(map(str, found))}); put the module before it"
    return None


def self_test() -> None:
    tests = {
        "a_thing_works": [pathlib.Path("crates/x/src/delta/tests.rs")],
        "twice": [pathlib.Path("crates/x/src/a.rs"), pathlib.Path("crates/x/src/b.rs")],
    }
    rows = {n: f"| C{n} | what | not yet |" for n in range(1, ROWS + 1)}

    def faults(changed: dict[int, str]) -> list[str]:
        return check("\n".join({**rows, **changed}.values()), tests)[0]

    assert faults({}) == []
    assert faults({7: "| C7 | what | `a_thing_works`, `delta::a_thing_works`, `b::twice` |"}) == []
    assert faults({7: "| C7 | what | `a_thing_fails` |"}) == ["C7: no test is called `a_thing_fails`"]
    assert faults({7: "| C7 | what | `a_thing_works`, `gone` |"}) == ["C7: no test is called `gone`"]
    assert faults({7: "| C7 | what | `wire::a_thing_works` |"}) == ["C7: no test is called `wire::a_thing_works`"]
    assert "several tests" in faults({7: "| C7 | what | `twice` |"})[0]
    assert faults({7: ""}) == ["C7: missing"]
    assert faults({7: rows[7] + "\n" + rows[7]}) == ["C7: listed more than once"]
    assert faults({99: "| C99 | what | not yet |"}) == ["C99: there is no such row"]
    for unclear in ["soon", "`a_thing_works` soon", "partly `a_thing_works`", "`a_thing_works` `b::twice`", "; still missing: all"]:
        assert faults({7: f"| C7 | what | {unclear} |"})[0].startswith("C7: write `name`"), unclear
    assert faults({7: "| C7 | | not yet |"}) == ["C7: says nothing"]
    assert "malformed" in faults({7: "| C7 | not yet |"})[0]

    part = "| C7 | what | `a_thing_works`, `b::twice`; still missing: a socket, and `sendfile` |"
    assert faults({7: part}) == [], "what is missing may name things that are no tests"
    assert faults({7: part.replace("b::twice", "gone")}) == ["C7: no test is called `gone`"]
    for silent in ["; still missing:", "; still missing: "]:
        assert faults({7: f"| C7 | what | `a_thing_works`{silent} |"}) == ["C7: does not say what is still missing"]
    whole = "| C8 | what | `a_thing_works` |"
    assert check("\n".join({**rows, 7: part, 8: whole}.values()), tests) == ([], 1, 1)

    source = """
        #[test]
        fn plain() {}
        proptest! { #![proptest_config(x)] #[test] fn property(a in 0..1) {} }
        #[test]
        #[ignore = "needs a GPU"]
        fn ignored() {}
        #[ignore] #[test] fn ignored_first() {}
        #[cfg_attr(miri, ignore)]
        #[test]
        fn ignored_somewhere() {}
        #[should_panic] #[test] #[allow(unused)] fn ignore_is_only_its_name() {}
        // #[test] fn commented() {}
        fn not_a_test() { let s = "#[test] fn quoted() {}"; }
        #[tokio::test(flavor = "current_thread")]
        pub(crate) async fn slow() {}
    """
    assert rust_tests(source) == ["plain", "property", "ignore_is_only_its_name", "slow"], rust_tests(source)
    assert _PYTHON_TEST.findall("def test_a():\n    def helper(): ...\n    async def test_b(): ...\n") == ["test_a", "test_b"]
    print("contract: self-test passed")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    faults, proved, partly = check(TABLE.read_text(), find_tests())
    for fault in faults:
        print(f"contract: {fault} (docs/contract.md)", file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"contract: {ROWS} rows, {proved} proved, {partly} partly, {ROWS - proved - partly} not yet; their tests exist")


if __name__ == "__main__":
    main()
