"""The contract check: docs/contract.md lists every row once, and the tests it names exist.

    scripts/contract.py               check; exit status 1 and one line per fault
    scripts/contract.py --self-test   show that the check itself can fail

A row is `| C12 | what | `test_name`, `module::test_name` |`, or `not yet` in the last cell. A row that is only
partly built says after its tests what it lacks: `` `test_name`; still missing: the socket``. Before that it may name what
`make gpu` runs besides: `` `test_name`; on a GPU: `tests/gpu/x.py` ``, files that it really runs and that prove nothing
alone. A name
stands for

- a Rust test: a function under `#[test]`, also inside `proptest!`;
- a Python test: what pytest collects from test_*.py below tests/python, tests/hosts and tests/engines, once however many parameters it has;
- a Python doc test, by the dotted name of what it documents: `windlass.transfer.base.choose`.

What may not run with the others proves nothing and does not count: a test under `#[ignore]`, one marked `skip`,
`skipif` or `xfail`, a doc test whose every line is skipped. With a module before it, the test must be in a file or
folder of that name.

A name belongs to one test, in both languages together; the `test_` that pytest asks for is no part of the sentence.
"""

import ast
import collections
import doctest
import pathlib
import re
import sys
import textwrap

from rust_source import ROOT, files, strip

ROWS = 110
TABLE = ROOT / "docs/contract.md"

_ROW = re.compile(r"^\|\s*C(\d+)\s*\|(.*)\|(.*)\|\s*$")
_INVARIANT = re.compile(r"^\| (W-\d+) \|.*\|(.*)\|\s*$")
_PROOF = re.compile(r"(?P<names>`[^`]+`(?:, `[^`]+`)*)(?:; on a GPU: (?P<gpu>`[^`]+`(?:, `[^`]+`)*))?(?P<partly>; still missing:(?P<lacks>.*))?")
_RUST_FN = re.compile(
    r"(?P<attributes>(?:#\[[^\]]*\]\s*)+)(?:pub(?:\([^)]*\))?\s+)?(?:async\s+)?fn\s+(?P<name>\w+)"
)
_TEST = re.compile(r"#\[(?:\w+::)*test(?:\([^\]]*\))?\]")
_IGNORE = re.compile(r"#\[\s*(?:ignore\b|cfg_attr\b[^\]]*\bignore\b)")
#: Marks under which pytest does not run a test, or runs it and does not mind.
_SKIPS = {"skip", "skipif", "xfail"}


def rust_tests(source: str) -> list[str]:
    """The tests that `cargo test` runs."""
    functions = _RUST_FN.finditer(strip(source))
    return [f["name"] for f in functions if _TEST.search(f["attributes"]) and not _IGNORE.search(f["attributes"])]


def python_tests(source: str) -> list[str]:
    """The tests that pytest collects from a file and runs."""
    tree = ast.parse(source)
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not _is_marked(node):
            found += [inner.name for inner in node.body if _is_test(inner)]
        elif _is_test(node):
            found.append(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and _skips(node.value):
            return []
    return found


def _is_test(node: ast.stmt) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, functions) and node.name.startswith("test_") and not _is_marked(node)


def _is_marked(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(_skips(decorator) for decorator in node.decorator_list)


def _skips(marks: ast.expr) -> bool:
    """Whether `pytest.mark.skip` or one of its kind stands in there, called or not, alone or in a list."""
    return any(isinstance(node, ast.Attribute) and node.attr in _SKIPS for node in ast.walk(marks))


def doc_tests(source: str, module: str) -> list[str]:
    """The dotted names of what has examples that run."""
    found = []

    def look(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            examples = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
            if any(not example.options.get(doctest.SKIP) for example in examples):
                found.append(name)
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for inner in node.body:
                look(inner, f"{name}.{getattr(inner, 'name', '')}")

    look(ast.parse(source), module)
    return found


def find_tests() -> dict[str, list[pathlib.Path]]:
    """Test name -> files that define it, relative to the root."""
    tests: dict[str, list[pathlib.Path]] = {}
    for path in [*files(".rs"), *files(".py")]:
        where = path.relative_to(ROOT)
        for name in tests_of(where, path.read_text()):
            tests.setdefault(name, []).append(where)
    return tests


def tests_of(path: pathlib.Path, source: str) -> list[str]:
    """The tests in a file, by where it is."""
    if path.suffix == ".rs":
        return rust_tests(source)
    below = any(path.is_relative_to(f"tests/{room}") for room in ("python", "hosts", "engines"))
    if below and path.name.startswith("test_"):
        return python_tests(source)
    if path.is_relative_to("python/windlass"):
        parts = path.relative_to("python").with_suffix("").parts
        return doc_tests(source, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return []


def shared(tests: dict[str, list[pathlib.Path]]) -> list[str]:
    """Faults: names that several tests have."""
    places: dict[str, list[pathlib.Path]] = collections.defaultdict(list)
    for name, paths in tests.items():
        places[name.removeprefix("test_")] += paths
    return [
        f"`{name}` is the name of several tests ({', '.join(map(str, paths))}); rename all but one"
        for name, paths in places.items()
        if len(paths) > 1
    ]


def check(table: str, tests: dict[str, list[pathlib.Path]]) -> tuple[list[str], int, int]:
    """Faults, how many rows are proved, and how many partly."""
    faults: list[str] = []
    seen: dict[int, int] = {}
    proved = partly = 0
    for line in table.splitlines():
        if invariant := _INVARIANT.match(line):
            names = re.findall(r"`([^`]*)`", invariant[2])
            faults += [f"{invariant[1]}: {fault}" for name in names if (fault := missing(name, tests))]
            continue
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
        scripts = re.findall(r"`([^`]*)`", cell["gpu"] or "")
        faults += [f"C{number}: `make gpu` does not run {name}" for name in scripts if name not in gpu_scripts()]
    for number in range(1, ROWS + 1):
        if seen.get(number, 0) != 1:
            faults.append(f"C{number}: {'missing' if number not in seen else 'listed more than once'}")
    faults += [f"C{number}: there is no such row" for number in sorted(seen) if not 1 <= number <= ROWS]
    return faults, proved, partly


def gpu_scripts() -> list[str]:
    """What `make gpu` runs."""
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu:")[2]
    parts = re.search(r"for part in ([\w ]+);", recipe)
    assert parts is not None, "the recipe of `make gpu` names its parts"
    return [name for part in parts[1].split() if (ROOT / (name := f"tests/gpu/{part}.py")).is_file()]


def missing(name: str, tests: dict[str, list[pathlib.Path]]) -> str | None:
    """What is wrong with a test's name, if anything."""
    *modules, test = name.split("::")
    if any(all(m in path.with_suffix("").parts for m in modules) for path in tests.get(test, [])):
        return None
    return f"no test is called `{name}`"


def self_test() -> None:
    tests = {
        "a_thing_works": [pathlib.Path("crates/x/src/delta/tests.rs")],
        "test_it_holds": [pathlib.Path("tests/python/test_b.py")],
    }
    rows = {n: f"| C{n} | what | not yet |" for n in range(1, ROWS + 1)}

    def faults(changed: dict[int, str]) -> list[str]:
        return check("\n".join({**rows, **changed}.values()), tests)[0]

    assert faults({}) == []
    assert faults({7: "| C7 | what | `a_thing_works`, `delta::a_thing_works`, `test_b::test_it_holds` |"}) == []
    assert faults({7: "| C7 | what | `a_thing_fails` |"}) == ["C7: no test is called `a_thing_fails`"]
    assert faults({7: "| C7 | what | `a_thing_works`, `gone` |"}) == ["C7: no test is called `gone`"]
    assert faults({7: "| C7 | what | `wire::a_thing_works` |"}) == ["C7: no test is called `wire::a_thing_works`"]
    assert faults({7: "| C7 | what | `it_holds` |"}) == ["C7: no test is called `it_holds`"]
    assert faults({7: ""}) == ["C7: missing"]
    assert faults({7: rows[7] + "\n" + rows[7]}) == ["C7: listed more than once"]
    assert faults({111: "| C111 | what | not yet |"}) == ["C111: there is no such row"]
    for unclear in ["soon", "`a_thing_works` soon", "partly `a_thing_works`", "`a_thing_works` `test_it_holds`", "; still missing: all"]:
        assert faults({7: f"| C7 | what | {unclear} |"})[0].startswith("C7: write `name`"), unclear
    assert faults({7: "| C7 | | not yet |"}) == ["C7: says nothing"]
    assert "malformed" in faults({7: "| C7 | not yet |"})[0]

    part = "| C7 | what | `a_thing_works`, `test_it_holds`; still missing: a socket, and `sendfile` |"
    assert faults({7: part}) == [], "what is missing may name things that are no tests"
    assert faults({7: part.replace("test_it_holds", "gone")}) == ["C7: no test is called `gone`"]
    for silent in ["; still missing:", "; still missing: "]:
        assert faults({7: f"| C7 | what | `a_thing_works`{silent} |"}) == ["C7: does not say what is still missing"]
    gpu = part.replace("; still", "; on a GPU: `tests/gpu/ipc.py`; still")
    assert faults({7: gpu}) == []
    for other in ("gone", "needs"):
        said = [f"C7: `make gpu` does not run tests/gpu/{other}.py"]
        assert faults({7: gpu.replace("ipc", other)}) == said
    assert check("| W-1 | what | `a_thing_works`, `gone` |", tests)[0][0].startswith("W-1: "), "an invariant's test is checked"
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
    source = """
        @pytest.mark.timeout(9)
        @pytest.mark.parametrize("n", [1, 2])
        def test_cases(n):
            def test_inner(): ...
            text = '''
            def test_quoted(): ...
            '''
        async def test_waits(): ...
        def helper(): ...
        # def test_commented(): ...
        @pytest.mark.skip
        def test_skipped(): ...
        @pytest.mark.skipif(not TOOLS, reason="no tools")
        def test_skipped_somewhere(): ...
        @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.xfail)])
        def test_expected_to_fail(n): ...
        class TestThing:
            def test_method(self): ...
            @mark.skip("later")
            def test_skipped_method(self): ...
        class Thing:
            def test_of_no_test_class(self): ...
        @pytest.mark.skip
        class TestSkipped:
            def test_in_skipped(self): ...
    """
    source = textwrap.dedent(source)
    found = ["test_cases", "test_waits", "test_method"]
    assert python_tests(source) == found, python_tests(source)
    assert python_tests(source + "pytestmark = pytest.mark.timeout(9)") == found
    for mark in ["pytest.mark.skip", "[pytest.mark.slow, pytest.mark.skipif(x, reason='')]"]:
        assert python_tests(source + f"pytestmark = {mark}") == []

    source = textwrap.dedent('''
        """>>> 1"""
        def example():
            """>>> 2
            2"""
        def prose():
            """No example."""
        class Thing:
            """>>> Thing()  # doctest: +SKIP"""
            def method(self):
                """>>> 3  # doctest: +SKIP
                >>> 4"""
    ''')
    assert doc_tests(source, "windlass.x") == ["windlass.x", "windlass.x.example", "windlass.x.Thing.method"]
    for where, found in {
        "tests/python/test_x.py": ["test_a"],
        "tests/python/x_ranks.py": [],
        "tests/engines/x/test_x.py": ["test_a"],
        "scripts/test_x.py": [],
        "python/windlass/x/__init__.py": ["windlass.x.test_a"],
        "crates/x/src/lib.rs": [],
    }.items():
        assert tests_of(pathlib.Path(where), "def test_a():\n    '>>> 1'") == found, where

    rust, python, other = (pathlib.Path(p) for p in ("crates/x/src/a.rs", "tests/python/test_a.py", "tests/python/test_b.py"))
    assert shared({"holds": [rust], "test_other": [python], "windlass.holds": [python]}) == []
    for names in [{"holds": [rust], "test_holds": [python]}, {"test_holds": [python, other]}, {"holds": [rust, rust]}]:
        assert len(shared(names)) == 1 and "`holds` is the name of several tests" in shared(names)[0], names
    print("contract: self-test passed")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    tests = find_tests()
    faults, proved, partly = check(TABLE.read_text(), tests)
    faults = [f"{fault} (docs/contract.md)" for fault in faults] + shared(tests)
    for fault in faults:
        print(f"contract: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"contract: {ROWS} rows, {proved} proved, {partly} partly, {ROWS - proved - partly} not yet; their tests exist")


if __name__ == "__main__":
    main()
