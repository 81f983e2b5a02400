"""Just enough of Rust's grammar to look for words in code and not in comments or strings."""

import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent

_TOKEN = re.compile(
    r"""
      //[^\n]*                                  # line comment
    | /\*                                       # block comment: nested, so finished by hand
    | \b(?:b|c)?r(?P<hashes>\#*)"               # raw string: finished by hand
    | \b[bc]?"(?:\\.|[^"\\])*"                  # string (with prefix)
    | "(?:\\.|[^"\\])*"                         # string
    | b?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[^}]*\}|.)|[^'\\\n])'   # character; a lifetime has no closing quote
    """,
    re.VERBOSE | re.DOTALL,
)


def strip(text: str) -> str:
    """The text with comments and literals blanked out; lines keep their numbers."""
    out: list[str] = []
    at = 0
    while (match := _TOKEN.search(text, at)) is not None:
        end = match.end()
        if match.group() == "/*":
            end = _end_of_comment(text, end)
        elif match.group("hashes") is not None:
            close = text.find('"' + match.group("hashes"), end)
            end = len(text) if close < 0 else close + 1 + len(match.group("hashes"))
        out.append(text[at : match.start()])
        out.append("\n" * text.count("\n", match.start(), end) or " ")
        at = end
    out.append(text[at:])
    return "".join(out)


def _end_of_comment(text: str, at: int) -> int:
    depth = 1
    for match in re.compile(r"/\*|\*/").finditer(text, at):
        depth += 1 if match.group() == "/*" else -1
        if depth == 0:
            return match.end()
    return len(text)


def files(suffix: str) -> list[pathlib.Path]:
    """Files of the repository; build outputs and hidden folders are left out."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("target", "__pycache__"))
        found += [pathlib.Path(folder) / name for name in sorted(names) if name.endswith(suffix)]
    return found
