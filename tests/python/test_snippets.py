"""What the pages show is what there is: Python that parses, and commands and flags that the command line knows.

Some pages' programs are also run, by the tests that name those pages.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from children import environment

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench/README.md"]
#: Changes of old releases name flags that are gone.
PAGES.remove(ROOT / "CHANGELOG.md")


def blocks(page: str, *languages: str) -> list[str]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", page, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, language, code in found if language in languages]


def parses(code: str) -> None:
    compile(code, "snippet", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_python_snippet_of_the_pages_parses() -> None:
    snippets = [(page, code) for page in PAGES for code in blocks(page.read_text(), "python")]
    assert len(snippets) > 30
    for page, code in snippets:
        try:
            parses(code)
        except SyntaxError as e:
            pytest.fail(f"{page.relative_to(ROOT)}: {e.msg}: {e.text}")
    with pytest.raises(SyntaxError):
        parses("with windlass.open_image() as image\n    pass\n")


@functools.cache
def help_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *command, "--help"],
        env=environment() | {"WINDLASS_CONFIG": "none"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def commands_in(text: str) -> set[str]:
    """The commands that a help page lists."""
    found = re.search(r"^Commands:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return set() if found is None else set(re.findall(r"^  ([a-z-]+)(?: |$)", found[1], re.MULTILINE))


def flags_in(text: str) -> set[str]:
    """The flags that a help page lists."""
    found = re.findall(r"^ {2,6}(-\w)?(?:, )?\s*(--[a-z][a-z0-9-]*)?", text, re.MULTILINE)
    return {flag for both in found for flag in both if flag}


def written(page: str) -> Iterator[list[str]]:
    """The words of every `windlass` command in the blocks for a shell, and of those in spans of code that name a command."""
    for code in blocks(page, "sh", "bash", "console"):
        for line in code.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";|&")
            lexer.whitespace_split = True
            try:
                words = list(lexer)
            except ValueError:
                # The first line of a quoted program of several lines, or an apostrophe of a command's output.
                words = line.split()
            if words and set(words[0]) <= set(";|&"):
                words = words[1:]
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words and words[0] == "windlass":
                yield words[1:]
    prose = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`windlass ([^`]+)`", prose):
        words = span.replace("\\|", "|").split()
        if words[0] in commands_in(help_of()):
            yield words


def unknown(words: list[str]) -> list[str]:
    """What the command line does not know of a command."""
    command: list[str] = []
    text = help_of()
    while words and (known := commands_in(text)):
        if words[0].startswith("-") or not re.fullmatch(r"[a-z]+", words[0]):
            break
        if words[0] not in known:
            return [words[0]]
        command, words = [*command, words[0]], words[1:]
        text = help_of(*command)
    flags = flags_in(text)
    if "--" in words:
        # `publish` hands these to an agent.
        assert command == ["publish"], words
        flags |= flags_in(help_of("agent"))
    given = [re.match(r"--?[A-Za-z][\w-]*", word) for word in words if word != "--"]
    return [found[0] for found in given if found and found[0] not in flags]


def test_every_command_on_the_pages_has_the_flags_that_it_is_given() -> None:
    found = [(page, words) for page in PAGES for words in written(page.read_text())]
    assert len(found) > 60
    wrong = [
        f"{page.relative_to(ROOT)}: windlass {' '.join(words)}" for page, words in found if unknown(words)
    ]
    assert not wrong
    for line in ("windlass recieve --from x", "windlass receive --form x", "X=1 windlass delta mak a b"):
        (words,) = written(f"```sh\n{line}\n```\n")
        assert unknown(words)
    (words,) = written("one `windlass receive --form\nURL` in prose")
    assert unknown(words) == ["--form"]


def test_the_page_of_the_command_line_lists_the_commands_and_exit_codes_of_its_help() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    table = page.split("| command | purpose | page |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = [command for row in rows for command in re.findall(r"`([a-z]+)`", row)]
    assert sorted(listed) == sorted(commands_in(help_of()) - {"help"})
    codes = re.findall(r"^\| (\d+) \| ?([a-z_]*) \|", page, re.MULTILINE)
    told = re.findall(r"^ +(\d+)  ([a-z_]+)  +\w", help_of(), re.MULTILINE)
    assert len(told) > 8
    assert sorted(codes) == sorted([*told, ("0", ""), ("1", "")])
