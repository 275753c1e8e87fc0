"""Placement: which part of each parameter and of each row tensor a rank owns.

Column-parallel weights are split on outputs, row-parallel ones on inputs, always by whole feature
units; norm weights are replicated. Parameter names are those of the diffusers checkpoint.
"""

from __future__ import annotations

import re

from h3lib.contract import LayoutError
from h3lib.layout import Ownership, Region, whole

REPLICATED, COLUMN, GATED_COLUMN, ROW = "replicated", "column-parallel", "gated column-parallel", "row-parallel"

PLACEMENT = (
    # pattern of the name inside a block, placement; a linear is (out, in)
    (r"attn\.to_[qkv]\.weight", COLUMN),
    (r"attn\.to_out\.0\.weight", ROW),
    (r"ff\.net\.0\.proj\.weight", GATED_COLUMN),  # rows are [value; gate]: each half by units
    (r"ff\.net\.2\.weight", ROW),
    (r"adaln_proj\.linear\.(weight|bias)", COLUMN),
    (r"(norm1|norm2|attn\.norm_q|attn\.norm_k)\.weight", REPLICATED),
    (r"time_embedder\.linear_[12]\.(weight|bias)", REPLICATED),
)
_BLOCK = re.compile(r"transformer_blocks\.\d+\.")


def placement(name: str) -> str:
    """How the parameter called `name` (full checkpoint name, or the name inside a block) is split."""
    local = _BLOCK.sub("", name)
    for pattern, kind in PLACEMENT:
        if re.fullmatch(pattern, local):
            return kind
    raise LayoutError("parameter name", name, "a parameter of a main block or of the time embedder")


def parameter_region(name: str, shape: tuple[int, ...], owner: Ownership, tp_rank: int) -> Region:
    """The part of the parameter `name` of global `shape` that `tp_rank` owns."""
    kind = placement(name)
    region = list(whole(shape))
    if kind == REPLICATED:
        return tuple(region)
    cuts, units = owner.feature_cuts(), owner.rows.contract.num_units
    dim = 1 if kind == ROW else 0
    width = shape[dim] // 2 if kind == GATED_COLUMN else shape[dim]
    part = range(width * cuts[tp_rank] // units, width * cuts[tp_rank + 1] // units)
    region[dim] = (part,)
    if kind == GATED_COLUMN:
        region[dim] = (part, range(part.start + width, part.stop + width))
    return tuple(region)
