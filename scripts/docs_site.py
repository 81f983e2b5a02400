"""What the documentation site adds to the pages as GitHub shows them; mkdocs.yml names it as a hook and as an extension of griffe.

Owns: the pages that are not in docs/ (`PAGES`), the links between pages and to other files of the repository, the navigation (from
the tables of docs/README.md), the version (from Cargo.toml), the names of the Python package on docs/python.md, and docstrings as
Markdown. Checks what mkdocs does not: that a page has the same structure on the site as on GitHub, and that nothing in the built
site is loaded from another host or leads nowhere. Run by `make docs`; `--self-test` builds a site with every fault. Must not: import
the package.
"""

from __future__ import annotations

import ast
import inspect
import logging
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
import tomllib
from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Pages outside docs/, and docs/README.md, which is not the site's first page: where each is on the site.
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "ARCHITECTURE.md": "architecture.md",
    "bench/README.md": "bench.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
}
#: The sections of docs/README.md whose tables are the navigation.
SECTIONS = ("Guides", "Reference", "Internals")
#: Blocks and spans of code, in which nothing is a link; or the target of a link.
LINK = re.compile(r"(?P<code>^```.*?^```|`[^`\n]+`)|\]\((?P<to>[^)\s]+)\)", re.MULTILINE | re.DOTALL)

# A warning fails the build.
log = logging.getLogger("mkdocs.hooks.docs_site")


# What the site is made of.


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    ref = config.extra["ref"]
    name = version if ref == f"v{version}" else f"{version} ({ref})"
    config.site_name = f"{config.site_name} {name}"
    # The theme asks GitHub for the stars of a `repo_url`. A link in the footer sends no request.
    config.extra["repository"] = (config.repo_url or "").rstrip("/")
    config.extra["social"] = [
        {"icon": "fontawesome/brands/git-alt", "link": config.extra["repository"], "name": "Repository"}
    ]
    config.repo_url = config.repo_name = None
    config.nav = navigation()
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def navigation() -> list[Any]:
    """The pages in the order of the tables in docs/README.md."""
    seen = set()
    found: list[Any] = [{"Windlass": ["index.md", {"All pages": "pages.md"}]}]
    for section in re.split(r"^## ", (ROOT / "docs/README.md").read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        pages: list[Any] = []
        for label, link in re.findall(r"\[([^]]+)\]\(([^)#\s]+\.md)\)", text):
            page = site_path(posixpath.normpath(f"docs/{link}"))
            if page is not None and page not in seen and title in SECTIONS:
                seen.add(page)
                pages.append(page if label.endswith(".md") else {label: page})
        if pages:
            found.append({title: pages})
    return [
        *found,
        {"Project": ["contributing.md", "changelog.md", {"Vulnerabilities": "vulnerabilities.md"}]},
    ]


def site_path(path: str) -> str | None:
    """The page or picture of the site that a file of the repository becomes."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).is_file() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    index = files.get_file_from_path("README.md")
    if index is not None:
        files.remove(index)
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def slug(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


# What a page is on the site.


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    page_of = {site: path for path, site in PAGES.items()}
    path = page_of.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if page.file.src_uri == "python.md":
        markdown = with_names(markdown)

    def rewritten(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        return f"]({target(found['to'], path, config)})"

    return LINK.sub(rewritten, markdown)


def target(link: str, path: str, config: MkDocsConfig) -> str:
    """A link of the file at ``path`` as the site has it. One that leads nowhere stays as it is, and mkdocs says so."""
    parts = urlsplit(link)
    if parts.scheme or not parts.path or parts.path.startswith("/"):
        return link
    to = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(parts.path)))
    anchor = f"#{parts.fragment}" if parts.fragment else ""
    page = site_path(to)
    if page is not None:
        return page + anchor
    if to.startswith("..") or not (ROOT / to).exists():
        return link
    kind = "tree" if (ROOT / to).is_dir() else "blob"
    return f"{config.extra['repository']}/{kind}/{config.extra['ref']}/{to}{anchor}"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Compares a page with what a reader like GitHub's makes of it: lists and tables are where the two differ."""
    if page.file.src_uri != "python.md":
        github = blocks(MarkdownIt("commonmark").enable("table").render(page.markdown or ""))
        site = blocks(html)
        if github != site:
            log.warning(
                "%s: GitHub finds %s, the site %s; put an empty line around lists, tables and headings",
                page.file.src_uri,
                dict(github - site),
                dict(site - github),
            )
    return html


def blocks(html: str) -> Counter[str]:
    return Counter(re.findall(r"<(h[1-6]|li|tr|pre|blockquote)\b", html))


# The Python package.


def with_names(markdown: str) -> str:
    """Every item ``- `windlass.NAME` `` becomes the documentation of that name."""
    named = re.findall(r"^- `(windlass[\w.]+)`$", markdown, re.MULTILINE)
    listed = {name.rpartition(".")[2] for name in named}
    for module in ("windlass/__init__.py", "windlass/config.py"):
        missing = public(ROOT / "python" / module) - listed - {"__version__"}
        if missing:
            log.warning("docs/python.md does not list %s of %s", ", ".join(sorted(missing)), module)
    return re.sub(r"^- `(windlass[\w.]+)`$", r"::: \1\n", markdown, flags=re.MULTILINE)


def public(module: Path) -> set[str]:
    """``__all__`` of a module."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


class Docstrings(griffe.Extension):
    """Turns what the package's docstrings use of reStructuredText into Markdown, and comments ``#:`` into docstrings."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **kwargs: Any) -> None:
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        above = attr.filepath.read_text().splitlines()[: attr.lineno - 1]
        comment: list[str] = []
        while above and above[-1].strip().startswith("#:"):
            comment.insert(0, above.pop().strip().removeprefix("#:").strip())
        if comment:
            attr.docstring = griffe.Docstring("\n".join(comment), parent=attr)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        todo: list[Any] = [pkg]
        while todo:
            thing = todo.pop()
            if thing.docstring is not None:
                thing.docstring.value = as_markdown(thing.docstring.value, thing, pkg)
            todo += [member for member in thing.members.values() if not member.is_alias]


def as_markdown(text: str, thing: Any, package: griffe.Module) -> str:
    text = inspect.cleandoc(text)
    text = re.sub(r"^((?:>>>|\.\.\.) .*?) *# doctest:.*$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"^>>> .*?(?=\n\n|\Z)", r"\n```pycon\n\g<0>\n```\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r":[a-z]+:`(~?)([^`]+)`", lambda found: reference(found[2], found[1], thing, package), text)
    return re.sub(r"(``)?\bdocs/([a-z-]+)\.md\1?", r"[docs/\2.md](\2.md)", text)


def reference(name: str, short: str, thing: Any, package: griffe.Module) -> str:
    """A role's name as code; a link where the site has it."""
    shown = name.rpartition(".")[2] if short else name
    scope = thing
    while scope is not None:
        path = f"{scope.path}.{name}".removeprefix("windlass.")
        for candidate in (path, name.removeprefix("windlass.")):
            try:
                found = package[candidate]
                path = found.final_target.path if found.is_alias else found.path
            except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
                continue
            return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'
        scope = scope.parent
    return f"`{shown}`"


# The built site.


class Built(HTMLParser):
    """What a page loads, where its links lead, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id" and value:
                self.anchors.add(value)
            elif value and (key == "src" or (key == "href" and tag == "link")):
                self.loads.append(value)
            elif value and key == "href":
                self.links.append(value)


def on_post_build(config: MkDocsConfig) -> None:
    folder = Path(config.site_dir)
    # The page for addresses that do not exist has absolute links, since it is shown anywhere.
    pages = {
        path: Built(path.read_text()) for path in sorted(folder.rglob("*.html")) if path.name != "404.html"
    }
    for path, built in pages.items():
        for link in [*built.loads, *built.links]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in built.loads:
                    log.warning("%s loads %s, from another host", path.name, link)
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if to.is_dir():
                to /= "index.html"
            if not to.exists():
                log.warning("%s: the link %s leads nowhere", path.name, link)
            elif parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].anchors:
                log.warning("%s: the link %s leads to no anchor", path.name, link)
    for path in folder.rglob("*.css"):
        for link in re.findall(r"""(?:url\(|@import )["']?((?:https?:)?//[^"')]+)""", path.read_text()):
            log.warning("%s loads %s, from another host", path.name, link)


# Whether it fails where it should.

#: Pages with one fault each and the words of the warning about it; the last one has none.
FAULTS = {
    "[a](nowhere.md)\n": "the target is not found",
    "[a](good.md#nowhere)\n": "does not contain an anchor '#nowhere'",
    "[a](../../above.md)\n": "the target is not found",
    "[a](/docs/good.md)\n": "an absolute link",
    "text\n- one\n- two\n": "GitHub finds {'li': 2}",
    "![a](https://example.org/a.png)\n": "from another host",
    '<a href="good.html#nowhere">a</a>\n': "leads to no anchor",
    "[a](../Cargo.toml) [b](good.md#a--b) [c](../README.md)\n": "",
}


def self_test() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("mkdocs.yml", "Cargo.toml", "scripts/docs_site.py", "docs/site.css", "docs/favicon.svg"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        for name in (*PAGES, "docs/good.md"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text("# A & b\n")
        (root / "python/windlass").mkdir(parents=True)
        rows = ["| [Good](good.md) |"]
        for number, text in enumerate(FAULTS):
            (root / f"docs/page-{number}.md").write_text(f"# Page\n\n{text}")
            rows.append(f"| [Page {number}](page-{number}.md) |")
        table = "\n".join(rows)
        (root / "docs/README.md").write_text(f"# Pages\n\n## Guides\n\n| page |\n|---|\n{table}\n")
        (root / "docs/left-out.md").write_text("# Left out\n")
        command = [sys.executable, "-m", "mkdocs", "build"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        warnings = done.stderr.split("WARNING -")[1:]
        missed = [words for words in FAULTS.values() if words and not any(words in each for each in warnings)]
        if done.returncode == 0 or missed or not any("left-out.md" in each for each in warnings):
            sys.exit(
                f"docs_site: the faults {missed} were not found (exit code {done.returncode}):\n{done.stderr}"
            )
        if f"page-{len(FAULTS) - 1}." in done.stderr:
            sys.exit(f"docs_site: the page without a fault has one:\n{done.stderr}")


if __name__ == "__main__":
    self_test()
