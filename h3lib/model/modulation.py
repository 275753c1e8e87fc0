"""Norms and AdaLN tables: what the blocks, the refiner and the output stage share.

    Norm            h = norm(x)
    ModulatedNorm   a = norm(x) * (1 + scale) + shift
    AdaLN           m = bf16(bf16(SiLU(temb)) W^T + b), viewed as a table of vectors of width D

Letters as in `block.py`; R rows of the table a timestep, C vectors a row.
"""

from __future__ import annotations

from torch import Tensor

from h3lib.layout import whole
from h3lib.model.context import BlockContext
from h3lib.model.trace import GRADIENT
from h3lib.ops import adaln, norm
from h3lib.ops.gemm import linear_forward


class Norm:
    """h = norm(x) on the rows of the slice, by the parameter `<name>.weight`."""

    def __init__(self, ctx: BlockContext, name: str):
        self.ctx, self.name, self.weight = ctx, name, f"{name}.weight"

    def forward(self, x_SD: Tensor) -> Tensor:
        """h `[S, D]`. **Order:** a row's squares in the in-row tree. **Rounds:** h, once."""
        ctx = self.ctx
        self.x = x_SD
        w, eps = ctx.weights[self.weight], ctx.size.norm_eps
        h, self.r = ctx.call(norm.rms_norm_forward, x_SD, w, eps)
        return ctx.slice_node(f"{self.name}.out", h)

    def backward(self, dh: Tensor, dx0: Tensor | None = None) -> Tensor:
        """dx `[S, D]`, added to another gradient dx0 of x; dw goes to the context.

        **Order**, **Rounds:** as `finish`.
        """
        roots = self.ctx.row_units(norm.norm_dw_terms(dh, self.x, self.r))[:, 0]
        return self.finish(dh, roots, dx0)

    def finish(self, dh: Tensor, roots: Tensor, dx0: Tensor | None) -> Tensor:
        """dx, added to dx0 if there is one, and dw from its roots `[R, D]`.

        **Order** of dw: row fold over row units. **Rounds:** dx, then the sum; dw once.
        """
        ctx, name, x, r = self.ctx, self.weight, self.x, self.r
        del self.x, self.r
        ctx.slice_node(f"d.{self.name}.out", dh)
        observe = ctx.observe_parameter(name)
        ctx.coming[name] = ctx.shard.sum_row_units(roots, ctx.dtype, observe)
        return ctx.call(norm.rms_norm_backward, dh, x, ctx.weights[name], r, dx0)


class ModulatedNorm:
    """a = norm(x) * (1 + scale) + shift on the rows of the slice; the result is named `output`."""

    def __init__(self, ctx: BlockContext, name: str, output: str):
        self.ctx, self.norm, self.output = ctx, Norm(ctx, name), output

    def forward(self, x_SD: Tensor, shift: Tensor, scale: Tensor, table_rows: Tensor) -> Tensor:
        """a `[S, D]`; shift, scale `[G, D]` are columns of the table, table_rows `[S]` its rows.

        **Order:** as `Norm.forward`. **Rounds:** h, 1 + scale, their product and the sum.
        """
        ctx, h = self.ctx, self.norm.forward(x_SD)
        self.scale, self.table_rows = scale, table_rows
        a = ctx.call(adaln.modulate_forward, h, shift, scale, table_rows)
        return ctx.slice_node(self.output, a)

    def backward(self, da: Tensor, dx0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """dx `[S, D]`, added to another gradient dx0 of x, and the roots of (dshift, dscale)
        `[R, G, 2, D]`; dw goes to the context.

        **Order:** dshift, dscale: row fold over row units, of the rows of a table row. **Rounds:**
        dh once, the roots not at all; the rest as `Norm.finish`.
        """
        ctx, x, r, shard = self.ctx, self.norm.x, self.norm.r, self.ctx.shard
        ctx.slice_node(f"d.{self.output}", da)
        operands = da, x, ctx.weights[self.norm.weight], r, self.scale
        place = self.table_rows, shard.owner.rows, shard.row_units
        dh, dtable, roots = ctx.call(adaln.modulated_norm_backward, *operands, *place)
        return self.norm.finish(dh, roots, dx0), dtable


class AdaLN:
    """The table `[R M, C, D]` of a linear whose columns are split over tp by column units."""

    def __init__(self, ctx: BlockContext, linear: str, rows_a_timestep: int, num_vectors: int):
        self.ctx, self.weight, self.bias = ctx, f"{linear}.weight", f"{linear}.bias"
        self.rows_a_timestep, self.num_vectors = rows_a_timestep, num_vectors
        self.width = rows_a_timestep * num_vectors * ctx.size.hidden_size

    def forward(self, temb_ME: Tensor) -> Tensor:
        """Columns of this rank's column units, gathered in order.

        **Order:** a chain a column. **Rounds:** SiLU of the FP32 embedding, then chain + bias once.
        """
        ctx = self.ctx
        self.temb = temb_ME
        self.s_ME = ctx.node("adaln.s", ctx.call(adaln.adaln_input_forward, temb_ME, ctx.dtype))
        w, bias = ctx.weights[self.weight], ctx.weights[self.bias]
        local = ctx.call(linear_forward, self.s_ME, w, bias)
        units = ctx.shard.contract.num_units
        cuts = [self.width * unit // units for unit in ctx.shard.owner.feature_cuts()]
        m = ctx.node("adaln.m", ctx.shard.mesh.tp.all_gather_columns(local, cuts))
        return m.view(self._table_shape())

    def backward(self, roots: Tensor) -> Tensor:
        """dtemb from the roots `[R, G, C, D]` of the table's gradient; also dw and dbias.

        **Order:** rows of a table row: row fold over row units; columns: unit tree over column
        units; timesteps: a chain, ascending.
        """
        ctx, shard, table = self.ctx, self.ctx.shard, self._table_shape()
        observe = ctx.observe("d.adaln.m", whole(table))
        dm = shard.sum_row_units(roots, ctx.dtype, observe).value().view(len(self.s_ME), -1)
        ctx.node("d.adaln.m", dm.view(table))

        part = shard.feature_range(self.width)
        dm_local = dm[:, part.start : part.stop].contiguous()
        if ctx.trace is None:  # rounded where it is finished
            dw, dbias = ctx.call(adaln.timestep_chain_product, dm_local, self.s_ME, ctx.dtype)
        else:
            dw, dbias = ctx.call(adaln.timestep_chain_dw, dm_local, self.s_ME)
        ctx.gradient(self.weight, dw)
        ctx.gradient(self.bias, dbias)
        roots = ctx.unit_tree((dm_local, ctx.weights[self.weight]))
        observe = ctx.observe("d.adaln.s", whole(tuple(self.s_ME.shape)))
        ds = ctx.node("d.adaln.s", shard.sum_feature_units(roots, ctx.dtype, observe))
        dtemb = ctx.call(adaln.adaln_input_backward, ds, self.temb)
        return ctx.node("dtemb", dtemb, GRADIENT)

    def _table_shape(self) -> tuple[int, int, int]:
        rows = self.rows_a_timestep * len(self.s_ME)
        return rows, self.num_vectors, self.ctx.size.hidden_size
