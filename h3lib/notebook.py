"""What the notebooks share: checked parameters, a report from the runner, tables and plots.

pandas and matplotlib are imported here and nowhere else in the package. Ranks are started only by
`h3lib run`, in a process of its own.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
from IPython import get_ipython
from IPython.display import HTML, Markdown
from matplotlib.axes import Axes
from matplotlib_inline.backend_inline import set_matplotlib_formats

from h3lib.contract import PUBLISHED, SIZES, H3Error, ReportError
from h3lib.doctor import fingerprint_digest
from h3lib.layout import Layout, Ownership
from h3lib.model.trace import KINDS
from h3lib.ops.backend import BACKENDS
from h3lib.parallel.launch import LAUNCHERS, die_with_parent
from h3lib.report import PHASES, read_report
from h3lib.request import DEVICES

ROOT = Path(__file__).resolve().parents[1]
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = (  # Okabe and Ito: told apart with any colour vision
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


class ParameterError(H3Error, ValueError):
    """A parameter of a notebook that does not exist, or has a type or value it cannot have."""


class RunRefused(ReportError):
    """`h3lib run` refused what it was asked for: unsupported or invalid."""


class RunFailed(ReportError):
    """A rank of `h3lib run` failed, was killed, or was late."""


def _integer(least: int) -> tuple[Callable[[object], bool], str]:
    def accepts(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return accepts, f"an integer of at least {least}"


def _one_of(names: Iterable[str]) -> tuple[Callable[[object], bool], str]:
    names = tuple(names)
    return lambda value: isinstance(value, str) and value in names, ", ".join(names)


def _new_file(value: object) -> bool:
    return isinstance(value, str) and (not value or (ROOT / value).parent.is_dir())


def _path(value: object) -> bool:
    return isinstance(value, str) and (not value or (ROOT / value).exists())


def _file(value: object) -> bool:
    return isinstance(value, str) and value != "" and (ROOT / value).is_file()


def _folder(value: object) -> bool:
    return isinstance(value, str) and value != "" and (ROOT / value).is_dir()


_MEASURED = (_file, "the path of a JSON file of measurements in this repository")
CHECKS = {
    "layout": (lambda value: isinstance(Layout.parse(value), Layout), "a layout"),
    "size": _one_of(SIZES),
    "rows": _integer(1),
    "device": _one_of(DEVICES),
    "backend": _one_of(BACKENDS),
    "seed": _integer(0),
    "report": (_path, "the path of a report in this repository, or nothing"),
    "layouts": (lambda value: isinstance(value, str), "the start of layout names, or nothing"),
    "launcher": _one_of(LAUNCHERS),
    "out": (_new_file, "the path of a new file in a folder that exists, or nothing"),
    "evidence": (_path, "the path of a folder of reports in this repository, or nothing"),
    "measured": _MEASURED,
    "timings": (_folder, "the path of a folder with layouts*.json in it or below"),
    "traffic": _MEASURED,
    "faults": _MEASURED,
    "litmus": _MEASURED,
    "gpus": _integer(1),
    "collectives": _MEASURED,
    "collective": (lambda value: isinstance(value, str), "the name of a collective"),
    "nic_gb_s": _integer(1),
    "nic_us": _integer(0),
    "nvlink_gb_s": _integer(1),
    "kernels": (_folder, "the path of a folder of benchmarks in this repository"),
}


def check_parameters(**values: object) -> SimpleNamespace:
    """The notebook's parameters, each of the right type and value; also sets the plot style.

    **Raises:** ParameterError for one that is wrong or that the notebook does not have (papermill
    only assigns: without this, a misspelt name runs with the default); LayoutError for a layout.
    """
    unknown = _injected_names() - set(values)
    if unknown:
        raise ParameterError("parameters", sorted(unknown), ", ".join(values))
    for name, value in values.items():
        accepts, accepted = CHECKS[name]
        if not accepts(value):
            raise ParameterError(f"parameter {name}", value, accepted)
    _set_style()
    return SimpleNamespace(**values)


def check_one_of(name: str, value: object, accepted: Iterable) -> None:
    """**Raises:** ParameterError for a value that the notebook's data does not have."""
    accepted = [*accepted]
    if value not in accepted:
        raise ParameterError(f"parameter {name}", value, ", ".join(map(str, accepted)))


def _injected_names() -> set[str]:
    """Names that papermill assigned: its cell starts with the comment `# Parameters`."""
    shell = get_ipython()
    cells = [] if shell is None else shell.user_ns.get("In", [])
    injected = [cell for cell in cells if cell.startswith("# Parameters\n")]
    body = ast.parse(injected[-1]).body if injected else []
    return {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets}


def _set_style() -> None:
    set_matplotlib_formats("svg")
    plt.rcParams.update(
        {
            "figure.figsize": (5.2, 3.3),  # readable when scaled to the width of a phone
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(color=COLOURS),
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "svg.hashsalt": "h3lib",
        }
    )


def report_path(p: SimpleNamespace) -> Path:
    """Where the report of these parameters is: the given file, or the file that a run writes."""
    if p.report:
        return ROOT / p.report
    if p.out:
        return ROOT / p.out
    name = f"{p.layout}_{p.size}_{p.rows}_{p.device}_{p.backend}_{p.seed}.json"
    return ROOT / "build" / "notebooks" / name


def obtain_report(p: SimpleNamespace) -> dict:
    """The report `p.report`, or that of a new `h3lib run` of p's layout, size, rows and device.

    **Raises:** RunRefused or RunFailed for a run without a verdict; ReportError if the report is
    not whole or of another layout.
    """
    path = report_path(p)
    if not p.report:
        path.parent.mkdir(parents=True, exist_ok=True)
        _run(p, path)
    report = read_report(path)
    if report["layout"] != p.layout:
        raise ReportError(f"layout of {path.name}", report["layout"], p.layout)
    return report


def _run(p: SimpleNamespace, path: Path) -> None:
    options = {
        "layout": p.layout, "size": p.size, "rows": p.rows, "device": p.device,
        "backend": p.backend, "weights": f"synthetic:{p.seed}", "launcher": p.launcher, "out": path,
    }  # fmt: skip
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "h3lib.cli", "run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)
    print(done.stdout, end="")
    if done.returncode not in (0, 1):
        error = RunRefused if done.returncode == 2 else RunFailed
        raise error("h3lib run", f"status {done.returncode}: {done.stderr.strip()}", "a report")


def read_measured(path: str) -> dict:
    """What a program of `h3lib.bench` wrote, if it came to its end.

    **Raises:** ReportError for a file that cannot be read or is not complete.
    """
    try:
        content = json.loads((ROOT / path).read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"measurements {path}", str(error), "a JSON file") from error
    if not isinstance(content, dict) or content.get("complete") is not True:
        raise ReportError(f"measurements {path}", "incomplete", "`complete: true`")
    return content


def answer(text: str) -> Markdown:
    """The boxed answer of a page; its cell renders Markdown as MyST."""
    return Markdown(f":::{{admonition}} Answer\n:class: tip\n{text}\n:::")


def tensor_table(report: dict, kinds: Iterable[str]) -> pd.DataFrame:
    """The compared values of these kinds, one line each."""
    lines = [
        {
            "value": tensor["name"],
            "kind": tensor["kind"],
            "shape": " × ".join(map(str, tensor["shape"])),
            "dtype": tensor["dtype"],
            "compared": tensor["total"],
            "different": tensor["different"],
            "verdict": "≠" if tensor["different"] else "=",
        }
        for kind in kinds
        for tensor in report["tensors"]
        if tensor["kind"] == kind
    ]
    return pd.DataFrame(lines)


def kind_table(report: dict) -> pd.DataFrame:
    """The verdict by kind of value, one line each; last the run without a trace, if there was."""
    by_kind = tensor_table(report, KINDS).groupby("kind", sort=False)
    table = by_kind.agg(
        values=("value", "size"), compared=("compared", "sum"), different=("different", "sum")
    )
    table = table.reset_index()
    again = report.get("untraced", {})
    if again.get("values"):
        row = ("without a trace", again["values"], again["total"], again["different"])
        table.loc[len(table)] = row
    return table


def control_table(report: dict) -> pd.DataFrame:
    """What the control changed, one line for each mesh axis that adds across ranks."""
    table = pd.DataFrame(report["control"]["axes"])
    return table.assign(
        share=[f"{d / t:.0%}" for d, t in zip(table["different"], table["total"], strict=True)]
    )


def show(table: pd.DataFrame, wrap: bool = False) -> HTML:
    """A table that scrolls sideways on a narrow screen, over the digest of the environment."""
    html = table.to_html(
        index=False, border=0, classes="table h3-table" + " h3-wrap" * wrap, justify="left",
        formatters={c: "{:,}".format for c in table.select_dtypes("integer").columns},
    )  # fmt: skip
    place = f'<p class="h3-environment">page executed in environment {fingerprint_digest()}</p>'
    return HTML(f'<div style="overflow-x: auto">{html}</div>{place}')


def plot_timings(report: dict, ax: Axes) -> None:
    """Seconds of each phase of a run, as horizontal bars."""
    phases = [phase for phase in PHASES if phase != "total"]
    seconds = [report["timings_s"][phase] for phase in phases]
    bars = ax.barh(phases, seconds, color=BLUE)
    ax.bar_label(bars, fmt="%.3g", padding=3)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.15)
    ax.set(xlabel="seconds", ylabel="phase")


def plot_ownership(report: dict, ax: Axes) -> None:
    """Boxes of feature units by packed rows, one for each rank; dotted lines are cuts of SP."""
    layout = Layout.parse(report["layout"])
    owner = Ownership.of(layout, report["rows"], PUBLISHED)
    units, rows = owner.feature_cuts(), owner.shard_row_cuts()
    for rank in range(layout.num_ranks):
        c, t = layout.place(rank)
        width, height = units[t + 1] - units[t], rows[c + 1] - rows[c]
        if not height:
            continue
        colour = COLOURS[rank % len(COLOURS)]
        ax.bar(
            units[t],
            height,
            width,
            rows[c],
            align="edge",
            color=colour,
            alpha=0.3,
            edgecolor="black",
        )
        ax.text(
            units[t] + width / 2, rows[c] + height / 2, f"rank {rank}", ha="center", va="center"
        )
        if layout.sp and t == 0:
            ax.hlines(owner.slice_row_cuts(c)[1:-1], 0, units[-1], color="black", linestyle=":")
    ax.set(xlabel="feature units", ylabel="packed rows", xlim=(0, units[-1]), ylim=(rows[-1], 0))
    ax.grid(visible=False)
