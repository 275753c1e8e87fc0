"""What determinism costs in a layout: one number each, from the files of `h3lib bench layouts`.

price = our time / that of diffusers' block under plain TP, SP or CP over NCCL, the faster of eager
and compiled, for one forward and backward at `ROWS` rows
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from h3lib.contract import PUBLISHED, ReportError
from h3lib.layout import Layout

ROWS, PASS = 14910, "forward + backward"
NOT_TIMED = (
    f"**Not measured:** a forward and backward of {ROWS:,} rows in layouts whose ranks each own a "
    "GPU, beside diffusers with NCCL. `h3lib bench layouts` measures it; no report of it is here."
)
_WORDS = (
    "What that costs, where each rank owns a GPU: the time of one block, forward and backward, "
    f"{ROWS:,} rows, over that of diffusers' block under plain tensor, sequence, or context "
    "parallelism with NCCL on the same GPUs in the same run, the faster of eager and "
    "`torch.compile`. *Exposed*: communication that the products do not hide."
)
_FIGURE_WORDS = "Bars: our time over that of diffusers with NCCL, for each layout."
_LISTS = ("measurements", "memory", "bits", "agreement")
_SAME = ("layout", "rows", "op", "graph", "against")
_BAR, _GAP, _LEFT, _WIDTH, _RIGHT = 22, 10, 96, 420, 150


def timing_files(*folders: Path | str) -> list[dict]:
    """The files `layouts*.json` in folders and below, the oldest first; a list that one does not
    have is empty (memory may be measured without times).

    **Raises:** ReportError for one that is not complete or of another contract.
    """
    found = []
    for path in sorted(path for folder in folders for path in Path(folder).rglob("layouts*.json")):
        content = json.loads(path.read_text())
        if content.get("complete") is not True:
            raise ReportError(f"measurements {path.name}", "incomplete", "`complete: true`")
        if content.get("contract") != PUBLISHED.id:
            raise ReportError(f"contract of {path.name}", content.get("contract"), PUBLISHED.id)
        found.append({name: [] for name in _LISTS} | content)
    return sorted(found, key=lambda content: content["environment"]["date"])


def timed_lines(files: Iterable[dict]) -> list[dict]:
    """Lines that were run, by ranks, layout and rows; of one that was run twice, the newest."""
    newest = {
        tuple(line[key] for key in _SAME): line
        for content in files
        for line in content["measurements"]
        if line["status"] == "run"
    }
    return sorted(newest.values(), key=lambda line: (*_order(line), line["rows"], line["op"]))


def prices(lines: Sequence[dict]) -> list[dict]:
    """For each layout the line of `PASS` at `ROWS` against the faster of theirs."""
    fastest: dict[str, dict] = {}
    for line in lines:
        if (line["rows"], line["op"], line["graph"]) == (ROWS, PASS, False):
            best = fastest.setdefault(line["layout"], line)
            if line["theirs_ms"] < best["theirs_ms"]:
                fastest[line["layout"]] = line
    return list(fastest.values())


def price_line(line: dict) -> dict[str, str]:
    """A price, in one line of text cells."""
    return {
        "layout": line["layout"],
        "GPUs": str(line["ranks"]),
        "ours (ms)": f"{line['ours_ms']:.1f}",
        "diffusers (ms)": f"{line['theirs_ms']:.1f}",
        "against": line["against"].removeprefix("diffusers ").removesuffix(", NCCL"),
        "price": f"{line['price']:.2f}",
        "communication exposed (ms)": f"{line['exposed_ms']:.1f}",
        "hidden (ms)": f"{line['hidden_ms']:.1f}",
    }


def price_text(lines: Sequence[dict], table: str, figure: str) -> str:
    """Markdown of the README: the prices' table and the path of their figure, or what lacks."""
    if not lines:
        return NOT_TIMED + "\n"
    return f"{_WORDS}\n\n![{_FIGURE_WORDS}]({figure})\n\n{table}"


def price_figure(lines: Sequence[dict]) -> str:
    """Bars of the prices as SVG, with a line where both sides take the same time."""
    most = max(1.0, *(line["price"] for line in lines))
    scale, height = _WIDTH / most, len(lines) * (_BAR + _GAP) + 40
    total = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" role="img" '
        """font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="14" fill="#111">""",
        f"<title>{escape(_title(lines))}</title>",
        f'<rect width="{total}" height="{height}" rx="8" fill="#fff"/>',
    ]
    for i, line in enumerate(lines):
        y, width = 8 + i * (_BAR + _GAP), line["price"] * scale
        middle = y + _BAR / 2 + 4.5
        words = f"{line['price']:.2f}  ({line['ours_ms']:.0f} ms)"
        parts += [
            f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{escape(line["layout"])}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="#0072B2"/>',
            f'<text x="{_LEFT + max(width, scale) + 6:.1f}" y="{middle}">{words}</text>',
        ]
    at = _LEFT + scale
    parts += [
        f'<path d="M{at:.1f} 4V{height - 28}" stroke="#D55E00" stroke-width="2"/>',
        f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle">diffusers, NCCL = 1</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(lines: Sequence[dict]) -> str:
    return "Time beside diffusers' with NCCL: " + ", ".join(
        f"{line['layout']} {line['price']:.2f}" for line in lines
    )


def _order(line: dict) -> tuple[int, int, str]:
    layout = Layout.parse(line["layout"])
    return layout.num_ranks, -layout.tp, layout.name
