"""The products' compiled code, read without a GPU: every directive entry, every form."""

import functools
import re

import pytest
import torch

from h3lib.contract import BackendError, RowUnits
from h3lib.ops.hopper import directives, gemm_chain, gemm_fold
from h3lib.ops.hopper.compiled import compile_offline
from h3lib.ops.hopper.gemm_chain import chain_launch
from h3lib.ops.hopper.gemm_fold import TIMESTEP_TILE, fold_launch, timestep_chain_kernel
from h3lib.ops.hopper.gemm_fp32 import fp32_launch
from h3lib.ops.hopper.gemm_kernel import gemm_kernel
from h3lib.ops.hopper.gemm_tree import FINISH, finish_kernel, subtree_launch, tree_launch

EVERY = range(8)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def chain(tile, transposed=True, bias=None):
    w = meta(768, 1024).T if transposed else meta(1024, 768)
    return chain_launch(meta(1, 1000, 768), meta(1000, 1024), w, tile, bias)


def tree_parts(num_parts):
    b = [meta(768, 4096).T] if num_parts == 1 else [meta(4096, 768) for _ in range(num_parts)]
    return [(meta(1000, 4096), b_i) for b_i in b]


def tree(tile, width, num_parts, dtype):
    out = meta(8 // width, 1000, 768, dtype=dtype)
    return tree_launch(out, tree_parts(num_parts), EVERY, 0, width, tile)


def product(tile, num_parts=1):
    launch = subtree_launch(meta(1000, 768), tree_parts(num_parts), EVERY, EVERY, tile)
    return launch.launch if tile.units < 8 else launch


def fold(tile, root=EVERY, dtype=torch.bfloat16):
    out, rows = meta(1, 768, 512, dtype=dtype), RowUnits(8193)
    return fold_launch(out, meta(8193, 768), meta(8193, 512), rows, EVERY, root, tile)


OPS = ("linear_forward", "linear_dx", "unit_tree", "row_fold")
FORWARD, DX, TREE, FOLD = (directives.tiles(op) for op in OPS)
LOW = next(tile for tile in TREE if tile.swapped)
LAUNCHES = {
    **{f"linear_forward {tile}": (chain, tile) for tile in FORWARD},
    **{f"linear_dx {tile}": (chain, tile, False) for tile in DX},
    "linear_forward with bias": (chain, FORWARD[0], True, meta(768)),
    "linear_forward with bias, swapped": (chain, FORWARD[1], True, meta(768)),
    **{f"unit tree {tile}": (product, tile) for tile in TREE},
    "unit tree of three parts": (product, TREE[-1], 3),
    "unit tree of three parts, low": (product, LOW, 3),
    **{f"root of {n} units": (tree, TREE[-2], n, 2, torch.float32) for n in (2, 4, 8)},
    "root of 8 units, low": (tree, LOW, 8, 2, torch.float32),
    **{f"row fold {tile}": (fold, tile) for tile in FOLD},
    "row fold root": (fold, FOLD[0], range(0, 4), torch.float32),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_wgmma_and_tma_without_spills(name):
    make, *arguments = LAUNCHES[name]
    launch = make(*arguments)
    code = compile_offline(gemm_kernel, *launch.arguments, **launch.options)
    code.check(tensor_cores=True)
    # One wait a block, however many HGMMA it has: none was serialised.
    option = launch.options
    in_block = option["BK"] // 16 * (option["BM"] // 64) * (1 + (option["TAIL"] > 0))
    assert code.count("HGMMA") == code.count("WARPGROUP.DEPBAR") * in_block
    assert code.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("tile", directives.fp32_tiles(), ids=str)
@pytest.mark.parametrize("a_k_first, b_k_first", [(False, False), (True, True), (False, True)])
def test_fp32_chain_is_fused_multiply_adds(a_k_first, b_k_first, tile):
    f = functools.partial(meta, dtype=torch.float32)
    a, b = f(64, 100).T if a_k_first else f(100, 64), f(64, 96) if b_k_first else f(96, 64).T
    launch = fp32_launch(a, b, f(100, 96), f(96), tile, go_on=a_k_first)
    code = compile_offline(launch.kernel, *launch.operands, **launch.options)
    code.check(tensor_cores=False)
    assert not code.count("HMMA") and not code.count("HGMMA")
    assert code.count("FFMA") == tile.rows * tile.columns * tile.depth // (32 * tile.num_warps)
    assert "fma.rn.f32" in code.ptx and "mma" not in code.ptx
    assert a_k_first or re.search(r"ld\.global\S*\.v4", code.ptx)


def test_timestep_chain_rounds_the_product_first():
    b, f = meta(4096), meta(4096, dtype=torch.float32)
    code = compile_offline(
        timestep_chain_kernel, b, b, f, f, 2, 96, 2688, **TIMESTEP_TILE, enable_fp_fusion=False
    )
    code.check(tensor_cores=False)
    assert "mul.rn.f32" in code.ptx or "mul.f32" in code.ptx
    assert "fma" not in code.ptx and not code.count("FFMA")


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_nodes_are_added_by_plain_additions(nodes):
    code = compile_offline(
        finish_kernel, meta(4096, dtype=torch.float32), meta(512), 512, NODES=nodes, **FINISH
    )
    code.check(tensor_cores=False)
    adds = re.findall(r"add\S*\.f32", code.ptx)
    assert len(adds) * 128 == (nodes - 1) * FINISH["BLOCK"] and "fma" not in code.ptx


def test_spilled_registers_are_noticed():
    """The check is not blind: with too few registers at entry the code spills, and is refused."""
    launch = tree(TREE[-1], 8, 1, torch.bfloat16)
    code = compile_offline(gemm_kernel, *launch.arguments, **(launch.options | {"maxnreg": 128}))
    with pytest.raises(BackendError, match="compiled code"):
        code.check(tensor_cores=True)


def test_constants_come_in_the_kernels_order():
    """A compiled form is launched with positional constants."""
    launch = chain(FORWARD[0])
    names = [*launch.options][:-2]
    assert names == gemm_kernel.arg_names[len(launch.arguments) :]


def _of_tile(op, tile):
    """A launch on new tensors, and those tensors."""
    new = functools.partial(torch.zeros, dtype=torch.bfloat16)
    if op == "fold":
        dy, x, out = new(300, 768), new(300, 512), new(1, 768, 512)
        return fold_launch(out, dy, x, RowUnits(300), EVERY, EVERY, tile), (dy, x), out
    out = new(1, 264, 768)
    if op == "tree":
        parts = [(new(264, 4096), new(4096, 768)) for _ in range(3)]
        launch = tree_launch(out, parts, EVERY, 0, 8, tile)
        return launch, [tensor for part in parts for tensor in part], out
    x, w = new(264, 1024), new(768, 1024).T if op == "forward" else new(1024, 768)
    return chain_launch(out, x, w, tile), (x, w), out


@pytest.mark.parametrize(
    "op, tile",
    [("forward", FORWARD[0]), ("forward", FORWARD[1]), ("dx", DX[0]), ("dx", DX[1]),
     ("tree", LOW), ("tree", TREE[-1]), ("fold", FOLD[0])],
)  # fmt: skip
def test_a_kept_launch_reads_other_tensors_as_a_new_one_would(op, tile):
    kept = _of_tile(op, tile)[0].template()
    assert all(view is None or view.base.device.type == "meta" for view in kept.maps)
    fresh, tensors, out = _of_tile(op, tile)
    moved = kept.on(tensors, out)
    assert moved.sizes == fresh.sizes and moved.options == fresh.options
    assert (moved.tiles, moved.flops, moved.dtypes) == (fresh.tiles, fresh.flops, fresh.dtypes)
    for one, other in zip(moved.maps, fresh.maps, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.base.data_ptr() == other.base.data_ptr()
            assert one.base.dtype == other.base.dtype
            for name in ("shape", "strides", "block_shape", "layout"):
                assert getattr(one, name) == getattr(other, name)


def test_directives_lag_only_where_units_are_long_enough():
    for op in OPS:
        for blocks in range(12):
            tile = directives.tile_for(op, 1000, 7168, blocks)
            assert not tile.lag or blocks >= tile.stages + tile.lag
    for start, depth in ((16, 16), (32, 32), (48, 16), (64, 64), (128, 64)):
        assert directives.tile_for("row_fold", 1000, 7168, 100, start).depth == depth
    with pytest.raises(BackendError, match="multiple of 16"):
        directives.tile_for("row_fold", 1000, 7168, 100, 24)
    for rows, columns in ((264, 7168), (264, 28672), (136, 7168)):
        assert directives.tile_for("linear_dx", rows, columns, 84).swapped
    for rows in (128, 137, 256, 273, 4096):
        assert not directives.tile_for("linear_dx", rows, 7168, 84).swapped
    for rows in (128, 193, 256, 289, 4096):
        assert not directives.tile_for("unit_tree", rows, 5376, 14).swapped
    for rows in (129, 192, 257, 264, 288):
        assert directives.tile_for("unit_tree", rows, 5376, 14).rows == 96
    assert directives.fp32_tile_for(264, 96) != directives.fp32_tile_for(264, 5376)
    assert gemm_chain.MAX_DEPTH == gemm_fold.MAX_DEPTH == 64
