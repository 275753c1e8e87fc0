"""Time of the block in a layout, from measured kernels and measured links; nothing is timed here.

    time = sum over kernels of (time of the kernel alone on all rows and features) * share of a rank
         + sum over collectives of (alpha + bytes that a rank receives / beta), by step and level

Nothing overlaps. A *share* is what the rank with most rows has of them, times what it has of the
features. A collective is made of steps: a *finish* (FP32 roots, the tree) or a *gather*, each at a
*level*: peers of a node, or other nodes. alpha and beta of the peers are fitted from the report of
`h3lib bench collectives`, to reduce-scatters (finish) and all-gathers (gather); an all-reduce is
both, which checks the fit. Rates do not depend on how many peers there are, or on how small a
rank's products are: that is where the model is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from h3lib.contract import PUBLISHED, ModelSize, ReportError, model_size
from h3lib.layout import Layout, Ownership
from h3lib.parallel.transport import num_roots

FINISH, GATHER = "finish", "gather"
NODE, NIC = "peers of the node", "other nodes"
BF16, FP32 = 2, 4
ONE_SHOT_BYTES = 1 << 20  # as in parallel/peer.py
STEADY_BYTES = 128 << 20  # eager rows below: the host's launches, not the links
UNITS, SLICE, FEATURES = "units", "slice", "features"
FORWARD, BACKWARD = "forward", "backward"

KERNELS = (
    # pass, op, case (the start of it; "" any), how often, share
    (FORWARD, "linear_forward", "q, k or v forward", 3, UNITS),
    (FORWARD, "unit_tree_product", "to_out forward", 1, UNITS),
    (FORWARD, "linear_forward", "ff-in forward", 1, UNITS),
    (FORWARD, "unit_tree_product", "ff-down forward", 1, UNITS),
    (FORWARD, "linear_forward", "AdaLN linear forward", 1, FEATURES),
    (FORWARD, "attention forward", "", 1, UNITS),
    (FORWARD, "norm forward", "", 2, SLICE),
    (FORWARD, "modulate forward", "", 2, SLICE),
    (FORWARD, "residual forward", "", 2, SLICE),
    (FORWARD, "head norm forward", "", 2, UNITS),
    (FORWARD, "rotary forward", "", 2, UNITS),
    (FORWARD, "swiglu forward", "", 1, UNITS),
    (BACKWARD, "row_fold_product", "to_q, to_k or to_v dw", 3, UNITS),
    (BACKWARD, "row_fold_product", "to_out dw", 1, UNITS),
    (BACKWARD, "row_fold_product", "ff-in dw", 1, UNITS),
    (BACKWARD, "row_fold_product", "ff-down dw", 1, UNITS),
    (BACKWARD, "linear_dx", "to_out dx", 1, UNITS),
    (BACKWARD, "linear_dx", "ff-down dx", 1, UNITS),
    (BACKWARD, "unit_tree_product", "q, k, v dx", 1, UNITS),
    (BACKWARD, "unit_tree_product", "ff-in dx", 1, UNITS),
    (BACKWARD, "unit_tree_product", "AdaLN linear ds", 1, FEATURES),
    (BACKWARD, "timestep_chain_dw", "AdaLN linear dw", 1, FEATURES),
    (BACKWARD, "attention backward", "", 1, UNITS),
    (BACKWARD, "residual backward", "", 2, SLICE),
    (BACKWARD, "modulated norm backward", "", 2, SLICE),
    (BACKWARD, "norm backward, added", "", 2, SLICE),
    (BACKWARD, "head norm backward", "", 2, UNITS),
    (BACKWARD, "head norm weight", "", 2, UNITS),
    (BACKWARD, "rotary backward", "", 2, UNITS),
    (BACKWARD, "swiglu backward", "", 1, UNITS),
)
"""Every kernel of the block that is timed alone. The AdaLN linear has timesteps as its rows."""


@dataclass(frozen=True)
class Link:
    """One step at one level: microseconds = alpha + bytes that a rank receives / beta."""

    alpha_us: float
    bytes_per_us: float

    def us(self, num_bytes: float) -> float:
        return self.alpha_us + num_bytes / self.bytes_per_us


Links = dict[tuple[str, str], Link]
"""By (step, level)."""


@dataclass(frozen=True)
class Collective:
    """One collective of a block: elements of its global operand, bytes of one in the result, and
    maximal subtree roots of a rank (0: a gather)."""

    phase: str
    what: str
    axis: str
    op: str
    elements: int
    item: int
    roots: int = 0


def fit(points: list[tuple[float, float]]) -> Link:
    """Least squares of the relative error over (bytes, microseconds).

    **Raises:** ReportError for too few points, or a fit that is not one of a link.
    """
    if len(points) < 2:
        raise ReportError("points of a fit", len(points), "at least 2 that were measured")
    x = torch.tensor([[1 / us, b / us] for b, us in points], dtype=torch.float64)
    y = torch.ones(len(points), 1, dtype=torch.float64)
    alpha, slope = torch.linalg.lstsq(x, y).solution.flatten().tolist()
    if slope <= 0:
        raise ReportError("microseconds for a byte", slope, "more than 0")
    return Link(alpha, 1 / slope)


def measured_points(content: dict, step: str, key: str = "ours_us") -> list[tuple[float, float]]:
    """(bytes that a rank receives from peers, microseconds) of one step alone, from the report of
    `h3lib bench collectives`; `key` "theirs_us" is NCCL's."""
    op = {FINISH: "reduce_scatter_rows", GATHER: "all_gather_rows"}[step]
    share = (content["ranks"] - 1) / content["ranks"]
    return [
        (share * row["bytes"], row[key])
        for row in content["measurements"]
        if row["op"].startswith(op) and row[key] is not None and steady(row)
    ]


def steady(row: dict) -> bool:
    """Whether a row's time is the GPU's: a CUDA graph, or eager and long enough."""
    size = row["bytes"] * (2 if row["op"].startswith("all_gather") else 1)
    return row["graph"] or size >= STEADY_BYTES * 0.99


def fitted_links(content: dict, nic: Link) -> Links:
    """Links of the peers of a node as measured, of other nodes as given."""
    peers = {(step, NODE): fit(measured_points(content, step)) for step in (FINISH, GATHER)}
    return peers | {(step, NIC): nic for step in (FINISH, GATHER)}


def kernel_us(alone: list[dict], rows: int, line: tuple) -> float:
    """Time of one kernel of `KERNELS` alone; as a CUDA graph if it was timed as one too.

    **Raises:** ReportError if that was not measured.
    """
    _, op, case, _, share = line
    wanted = rows if share != FEATURES else 2
    found = [
        (not row["graph"], row["ours_us"])
        for row in alone
        if row["op"] == op and row["case"].startswith(case) and row["rows"] == wanted
    ]
    if not found:
        raise ReportError(f"time of {op} {case}", f"none at {wanted} rows", "one in the benchmark")
    return min(found)[1]


def compute_us(alone: list[dict], layout: Layout, rows: int) -> dict[str, float]:
    """Microseconds of a rank's kernels in each pass, from `measurements` of kernels alone."""
    owner = Ownership.of(layout, rows, PUBLISHED)
    shares = {
        UNITS: _most(owner.shard_row_cuts()) / rows / layout.tp,
        SLICE: _most(owner.row_cuts()) / rows,
        FEATURES: 1 / layout.tp,
    }
    total = dict.fromkeys((FORWARD, BACKWARD), 0.0)
    for line in KERNELS:
        phase, *_, count, share = line
        total[phase] += count * shares[share] * kernel_us(alone, rows, line)
    return total


def collectives(
    layout: Layout, rows: int, timesteps: int, size: ModelSize | None = None
) -> Iterator[Collective]:
    """What a rank of the block asks of its mesh, in order; of the full model unless `size` says."""
    size = size or model_size("full")
    owner = Ownership.of(layout, rows, PUBLISHED)
    hidden, tp = size.hidden_size, layout.tp
    shard = _most(owner.shard_row_cuts())
    width, ffn, heads = size.inner_dim // tp, size.ffn_dim // tp, size.num_attention_heads // tp
    columns = 18 * hidden * timesteps
    units = _most(owner.sequence_cuts())
    roots = {"tp": _most_roots(owner.feature_cuts()), "cp": _most_roots(owner.sequence_cuts())}
    row_axis, row_roots = ("stage" if layout.sp else "cp"), _most_roots(owner.row_unit_cuts())
    leave = "reduce_scatter_rows" if layout.sp else "all_reduce"

    def enter(phase: str, what: str) -> list[Collective]:
        gather = Collective(phase, what, "tp", "all_gather_rows", shard * hidden, BF16)
        return [gather] if layout.sp else []

    def total(what: str, axis: str, elements: int, item: int = BF16) -> Collective:
        return Collective(BACKWARD, what, axis, "all_reduce", elements, item, roots[axis])

    def over_rows(what: str, elements: int) -> Collective:
        return Collective(BACKWARD, what, row_axis, "all_reduce", elements, BF16, row_roots)

    def left(phase: str, what: str) -> Collective:
        return Collective(phase, what, "tp", leave, shard * hidden, BF16, roots["tp"])

    def sequence(phase: str, what: str, row: int, item: int = BF16) -> Collective:
        return Collective(phase, what, "cp", "all_gather_rows", rows * row, item)

    yield Collective(FORWARD, "AdaLN table", "tp", "all_gather_columns", columns, BF16)
    yield from enter(FORWARD, "attention in")
    yield from (sequence(FORWARD, name, width) for name in ("K", "V"))
    yield left(FORWARD, "attention out")
    yield from enter(FORWARD, "feed-forward in")
    yield left(FORWARD, "feed-forward out")
    yield from enter(BACKWARD, "d feed-forward out")
    yield total("dw ff-down", "cp", hidden * ffn)
    yield total("dw ff-in", "cp", 2 * ffn * hidden)
    yield left(BACKWARD, "d feed-forward in")
    yield over_rows("dw norm2", hidden)
    yield sequence(BACKWARD, "Q", width)
    yield sequence(BACKWARD, "log-sum-exp", heads, FP32)
    yield from enter(BACKWARD, "d attention out")
    yield sequence(BACKWARD, "dO", width)
    yield sequence(BACKWARD, "delta", heads, FP32)
    yield total("dw to_out", "cp", hidden * width)
    for name in "qk":
        yield total(f"dw norm_{name} over units", "tp", units * size.attention_head_dim, FP32)
        yield total(f"dw norm_{name}", "cp", size.attention_head_dim)
    yield from (total(f"dw to_{name}", "cp", width * hidden) for name in "qkv")
    yield left(BACKWARD, "d attention in")
    yield over_rows("dw norm1", hidden)
    yield over_rows("d AdaLN table", columns)
    yield total("d AdaLN input", "tp", timesteps * size.time_embed_dim)


def groups(layout: Layout) -> dict[str, tuple[int, int]]:
    """(ranks of a node, nodes) of each axis."""
    found = {}
    members = {"tp": layout.tp_group(0), "cp": layout.cp_group(0), "stage": layout.stage_group(0)}
    for axis, ranks in members.items():
        nodes = len({layout.node(rank) for rank in ranks})
        found[axis] = len(ranks) // nodes, nodes
    return found


def steps(call: Collective, local: int, nodes: int) -> list[tuple[str, str, float]]:
    """(step, level, bytes that a rank receives) of a collective among `local` ranks on
    each of `nodes` nodes: finish and exchange slices, then gather; or gather."""
    ranks, n = local * nodes, call.elements
    if ranks == 1:
        return []
    inside, between = (local - 1) / local, nodes - 1
    gather = call.item * n
    if not call.roots:
        parts = [(GATHER, NIC, gather / ranks * between), (GATHER, NODE, gather * inside)]
    else:
        roots = FP32 * call.roots * n
        if nodes == 1 and call.op == "all_reduce" and roots * (ranks - 1) <= ONE_SHOT_BYTES:
            return [(FINISH, NODE, roots * (ranks - 1))]
        # one rank on each of several nodes sends slices; several send the slice they share
        handled = n / local if local > 1 and call.op == "all_reduce" else n / ranks
        parts = [(FINISH, NODE, roots * inside), (FINISH, NIC, FP32 * handled * between)]
        if call.op == "all_reduce":
            level, share = (NODE, inside) if local > 1 else (NIC, between / nodes)
            parts.append((GATHER, level, gather * share))
    return [part for part in parts if part[2]]


def communication_us(
    layout: Layout, rows: int, timesteps: int, links: Links
) -> dict[str, dict[str, float]]:
    """Microseconds of a rank's collectives by pass and level."""
    by_axis = groups(layout)
    total = {phase: dict.fromkeys((NODE, NIC), 0.0) for phase in (FORWARD, BACKWARD)}
    for call in collectives(layout, rows, timesteps):
        for step, level, num_bytes in steps(call, *by_axis[call.axis]):
            total[call.phase][level] += links[step, level].us(num_bytes)
    return total


def _most(cuts: tuple[int, ...]) -> int:
    return max(b - a for a, b in zip(cuts, cuts[1:], strict=False))


def _most_roots(cuts: tuple[int, ...]) -> int:
    return max(num_roots(cuts, rank) for rank in range(len(cuts) - 1))
