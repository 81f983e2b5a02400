"""What was found, as JSON, as a table in Markdown, and as charts in SVG.

Owns: the output. Must not: measure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LANES = ("parameters", "served")
ENGINES = {"vllm": "a real vLLM server", "sglang": "a real SGLang server"}


def seconds(value: float) -> str:
    return (
        f"{value:.2f} s"
        if value >= 1
        else f"{value * 1e3:.0f} ms"
        if value >= 0.01
        else f"{value * 1e3:.1f} ms"
    )


def size(value: float) -> str:
    return (
        f"{value / 1e9:.2f} GB"
        if value >= 1e9
        else f"{value / 1e6:.1f} MB"
        if value >= 1e5
        else f"{value / 1e3:.1f} kB"
    )


#: Key, title, and how it is written.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("visible_s", "step to visible", seconds),
    ("pause_s", "engine pause", seconds),
    ("blocked_s", "trainer blocked", seconds),
    ("moved_bytes", "bytes moved", size),
    ("cpu_s", "CPU time", seconds),
    ("memory_bytes", "memory beyond the weights", size),
    ("device_bytes", "device memory beyond the weights", size),
)


def columns(found: dict[str, Any]) -> list[tuple[str, str, Callable[[float], str]]]:
    """Those of a table. Where weights are on a GPU, memory is that of the host or that of the device."""
    on_device = any("device_bytes" in row for row in found["peers"])
    return [
        (key, "host memory" if on_device and key == "memory_bytes" else title, write)
        for key, title, write in COLUMNS
        if on_device or key != "device_bytes"
    ]


def figure(row: dict[str, Any], key: str) -> dict[str, float] | None:
    """Median and range. Bytes moved are those of the network and those of files."""
    if key == "moved_bytes":
        files = row.get("file_bytes", 0)
        return {name: value + files for name, value in row["wire_bytes"].items()}
    found: dict[str, float] | None = row.get(key)
    return found


def cell(row: dict[str, Any], key: str, write: Callable[[float], str]) -> str:
    found = figure(row, key)
    if found is None:
        return "not measured"
    if key in ("memory_bytes", "device_bytes") or write(found["least"]) == write(found["most"]):
        return write(found["median"])
    return f"{write(found['median'])} ({write(found['least'])} to {write(found['most'])})"


def title_of(found: dict[str, Any]) -> str:
    return f"{found['size']}, " + ENGINES.get(found.get("engine", ""), "an engine that has only parameters")


def table(found: dict[str, Any]) -> list[str]:
    share = found["peers"][0]["changed_share"] if found["peers"] else 0
    lines = [f"## {title_of(found)}", ""]
    compared = f" Compared by {found['compared_by']}." if "compared_by" in found else ""
    lines += [
        f"{found['elements']:,} elements in bf16 ({size(found['elements'] * 2)}), {share:.2%} changed per step.{compared}",
        "",
    ]
    shown = columns(found)
    lines += ["| | " + " | ".join(title for _, title, _ in shown) + " | first version | equal |"]
    lines += ["|---" * (len(shown) + 3) + "|"]
    for row in found["peers"]:
        cells = [cell(row, key, write) for key, _, write in shown]
        equal = f"yes, {row['compared']} times" if row["equal"] else "**NO: wrong bytes**"
        lines.append(
            f"| {row['name']} | " + " | ".join(cells) + f" | {seconds(row['first']['visible_s'])} | {equal} |"
        )
    return [*lines, ""]


def markdown(result: dict[str, Any]) -> str:
    network = (
        "a network namespace of its own"
        if result["own_network"]
        else "the machine's loopback device, other programs included"
    )
    if result["rate"]:
        network += f" at {result['rate']}"
    lines = [
        "# Windlass and what is used instead",
        "",
        f"`{result['command']}` at {result['commit']}, {result['date']}, in {result['seconds']:.0f} s. {result['machine']}"
        + (f"; {result['note']}" if result["note"] else "")
        + f". Load average before and after: {result['load_before'][0]:.1f}, {result['load_after'][0]:.1f}.",
        "",
        f"Windlass: {result['windlass_build']}. Threads of torch in each process: {result['torch_threads']}. Medians, with the range in parentheses. Bytes are counted in {network}, with headers and acknowledgements.",
        "",
    ]
    for lane in LANES:
        for found in result[lane]:
            lines += table(found)
            lines += [f"![{title_of(found)}]({chart_name(found)})", ""]
    rows = {row["name"]: row for lane in LANES for found in result[lane] for row in found["peers"]}
    if rows:
        lines += ["## What was run", "", "| | versions | what it does | settings |", "|---|---|---|---|"]
        for name, row in rows.items():
            versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
            lines.append(f"| {name} | {versions} | {row['what']} | {row['settings']} |")
        lines.append("")
    if result["not_run"]:
        lines += ["## What was not run", "", "| | versions | reason |", "|---|---|---|"]
        for row in result["not_run"]:
            versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
            lines.append(f"| {row['name']} | {versions} | {row['reason'].replace('|', '/')} |")
        lines.append("")
    return "\n".join(lines)


def chart_name(found: dict[str, Any]) -> str:
    return f"{found.get('engine', 'parameters')}-{found['size']}.svg"


STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 13px; font-weight: 600; }
  .value { fill: #57606a; }
  .bar { fill: #8c959f; } .ours { fill: #0d9488; } .range { stroke: #1f2328; stroke-width: 1; opacity: .55; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .value { fill: #9da7b3; } .bar { fill: #6e7681; } .ours { fill: #2dd4bf; } .range { stroke: #e6edf3; }
  }
"""
LEFT, WIDE, STEP, GAP, TOP = 245, 300, 18, 34, 46


def chart(found: dict[str, Any]) -> str:
    """One panel for each figure. Bars are medians from zero, lines the ranges."""
    rows = found["peers"]
    shown = columns(found)
    panel = GAP + STEP * len(rows)
    width, height = LEFT + WIDE + 130, TOP + panel * len(shown)
    title = f"{title_of(found)}: medians; lines are ranges; shorter is better"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="10" y="22">{escape(title)}</text>',
    ]
    for number, (key, name, write) in enumerate(shown):
        y = TOP + panel * number
        out.append(f'<text class="title" x="10" y="{y + 4}">{escape(name)}</text>')
        figures = [figure(row, key) for row in rows]
        longest = max((f["most"] for f in figures if f is not None), default=0) or 1
        for line, (row, one) in enumerate(zip(rows, figures)):
            at = y + 12 + STEP * line
            out.append(f'<text x="{LEFT - 8}" y="{at + 11}" text-anchor="end">{escape(row["name"])}</text>')
            if one is None:
                out.append(f'<text class="value" x="{LEFT + 6}" y="{at + 11}">not measured</text>')
                continue
            length, low, high = (WIDE * one[k] / longest for k in ("median", "least", "most"))
            kind = "bar ours" if row["name"].startswith("Windlass") else "bar"
            out.append(
                f'<rect class="{kind}" x="{LEFT}" y="{at + 1}" width="{max(length, 0.5):.1f}" height="{STEP - 6}" rx="2"/>'
            )
            if high - low > 1:
                middle = at + 1 + (STEP - 6) / 2
                out.append(f'<path class="range" d="M{LEFT + low:.1f} {middle}H{LEFT + high:.1f}"/>')
            out.append(
                f'<text class="value" x="{LEFT + max(length, high) + 6:.1f}" y="{at + 11}">{write(one["median"])}</text>'
            )
    return "\n".join([*out, "</svg>"]) + "\n"


def write(result: dict[str, Any], folder: Path) -> Sequence[Path]:
    """All of it, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"peers.json": json.dumps(result, indent=1) + "\n", "peers.md": markdown(result)}
    for lane in LANES:
        for found in result[lane]:
            if found["peers"]:
                texts[chart_name(found)] = chart(found)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]
