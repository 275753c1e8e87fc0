"""The order of the block's sums over units, recomputed from its nodes with another program.

Two layouts agree on a wrong order as well as on the right one, and FP64 sees no order, so the
contract's sections 1 and 2 are written down here a second time: NumPy, one add at a time.
"""

import numpy as np
import pytest
import torch
from block_support import TINY, canonical, packed_rows

from h3lib.model.block import BLOCK_PREFIX
from h3lib.model.weights import SyntheticWeights

ROWS = 65  # one row block and a row
VALUES = canonical(ROWS)
SOURCE = SyntheticWeights(TINY, 0)


def _weight(name):
    return SOURCE.read(f"{BLOCK_PREFIX}{name}.weight").float().numpy()


def _node(name):
    return VALUES["node", name].float().numpy()


def _tree(leaves):
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) in FP32."""
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def _unit_leaf(parts, unit):
    """One chain over block `unit` of each part in turn: parts of (rows x K, K x columns)."""
    total = np.zeros((parts[0][0].shape[0], parts[0][1].shape[1]), np.float32)
    for a, b in parts:
        width = a.shape[1] // 8
        for k in range(unit * width, (unit + 1) * width):
            total = total + a[:, k : k + 1] * b[k : k + 1]
    return total


SUMS = {
    "attn.out": lambda: [(_node("attn.heads"), _weight("attn.to_out.0").T)],
    "ff.out": lambda: [(_node("ff.swiglu"), _weight("ff.net.2").T)],
    "d.attn.in": lambda: [
        (_node(f"d.attn.{name}"), _weight(f"attn.to_{name}")) for name in ("q", "k", "v")
    ],
    "d.ff.in": lambda: list(
        zip(
            (_node("d.ff.value"), _node("d.ff.gate")),
            np.split(_weight("ff.net.0.proj"), 2),
            strict=True,
        )
    ),
}


def _assert_same_bytes(value, root):
    assert np.array_equal(value.view(np.int32), root.numpy().view(np.int32))


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_feature_units(name):
    """Block j of q, then of k, then of v; of value, then of gate: one chain each."""
    parts = SUMS[name]()
    _assert_same_bytes(_tree([_unit_leaf(parts, u) for u in range(8)]), VALUES["root", name])
    if len(parts) > 1:  # the probe can fail: the other order of the parts is another sum
        other = _tree([_unit_leaf(parts[::-1], u) for u in range(8)])
        assert not np.array_equal(other, VALUES["root", name].numpy())


@pytest.mark.parametrize("name", ("q", "k"))
def test_head_norm_gradients(name):
    """Leaf = (row block, feature unit), rows outer, heads inner; then row units, feature units,
    sequence units. 65 rows are one key block, so all are of sequence unit 7, whose row units
    0 to 7 hold its two row blocks at 3 and 7."""
    size, heads = TINY.attention_head_dim, TINY.num_attention_heads
    x = _node(f"attn.{name}").reshape(ROWS, heads, size)
    cos_sin_free = VALUES["node", f"d.attn.{name}_rope"].reshape(ROWS, heads, size)
    dh = _unrotate(cos_sin_free).float().numpy()
    square = x * x
    while square.shape[-1] > 1:
        half = square.shape[-1] // 2
        square = square[..., :half] + square[..., half:]
    r = np.float32(1) / np.sqrt(square / np.float32(size) + np.float32(TINY.norm_eps))
    terms = dh * (x * r)
    by_unit = []
    for unit in range(8):
        blocks = []
        for start in (0, 64):
            total = np.zeros(size, np.float32)
            for row in range(start, min(start + 64, ROWS)):
                for head in range(unit * heads // 8, (unit + 1) * heads // 8):
                    total = total + terms[row, head]
            blocks.append(total)
        by_unit.append(blocks[0] + blocks[1])
    _assert_same_bytes(_tree(by_unit), VALUES["root", f"attn.norm_{name}.weight"])


def _unrotate(dy):
    from h3lib.ops.rope import rope_table, rotary_backward

    cos, sin = rope_table(packed_rows(ROWS).position_ids, TINY, torch.bfloat16)
    return rotary_backward(dy, cos, sin)
