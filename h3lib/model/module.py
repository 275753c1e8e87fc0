"""The block as a PyTorch module: checkpoint names, `load_state_dict`, autograd.

    block = H3Block(SIZES["tiny"])
    block.load_state_dict(weights)
    out = block(x, temb, metadata)        # packed rows in, packed rows out, on one process
    out.backward(dout)                    # x.grad, temb.grad and every parameter's grad

One autograd node holds the whole block, so the backward is the contract's, not autograd's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from h3lib.contract import PUBLISHED, Contract, ContractError, ModelSize
from h3lib.layout import region_shape
from h3lib.model.block import Block, block_parameters
from h3lib.model.context import Rows
from h3lib.ops.adaln import table_rows
from h3lib.ops.rope import rope_table
from h3lib.parallel.shard import SeqShard, coshard, parameter_region
from h3lib.rows import LogicalRows


@dataclass(frozen=True)
class PackedRows:
    """Metadata of all packed rows: position_ids `[P, 3]` FP64, token_tags and timestep_indices
    `[P]` int64, logical_keys `[P, 2 or 3]` int64 (None: rows as they are stored)."""

    position_ids: Tensor
    token_tags: Tensor
    timestep_indices: Tensor
    logical_keys: Tensor | None = None

    def logical(self) -> LogicalRows:
        """**Raises:** RowsError for keys that cannot be ordered."""
        if self.logical_keys is None:
            return LogicalRows(len(self.token_tags), len(self.token_tags))
        return LogicalRows.of(self.logical_keys)


class H3Block(nn.Module):
    """out = block(x, temb): rows `[P, D]` and temb `[M, E]` to `[P, D]`.

    With a `shard`, parameters are this rank's parts, x is still all packed rows, and the result is
    the rank's rows `[S, D]` in logical order; without, a world of one and packed rows out, padded
    rows +0.

    **Order:**, **Rounds:** h3-parallel-v1, see `model/block.py`. **Raises:** RowsError for logical
    keys, OperandError for operands, ContractError for a size that cannot be cut.
    """

    def __init__(
        self,
        size: ModelSize,
        shard: SeqShard | None = None,
        contract: Contract = PUBLISHED,
        backend: str = "eager",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        if shard is not None and shard.contract != contract:
            raise ContractError("contract of the shard", shard.contract.id, contract.id)
        self.size, self.shard, self.contract, self.backend = size, shard, contract, backend
        place = shard or SeqShard.canonical(1, contract)
        for name, (shape, _) in block_parameters(size).items():
            part = region_shape(parameter_region(name, shape, place.owner, place.tp_rank))
            add_parameter(self, name.split("."), torch.empty(part, device=device, dtype=dtype))

    def forward(self, x: Tensor, temb: Tensor, packed: PackedRows) -> Tensor:
        rows = packed.logical()
        shard = self.shard or SeqShard.canonical(rows.num_rows, self.contract)
        cos, sin = rope_table(rows.gather(packed.position_ids), self.size, x.dtype)
        own = slice(shard.shard_rows.start, shard.shard_rows.stop)
        table = table_rows(packed.timestep_indices, packed.token_tags, len(temb))
        x, table = coshard(shard, rows, x, table)
        metadata = Rows(table, cos[own], sin[own])
        names, weights = zip(*self.named_parameters(), strict=True)
        out = _BlockFunction.apply(self, shard, metadata, names, x, temb, *weights)
        return out if self.shard else rows.scatter(out)


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, shard, metadata, names, x, temb, *weights):
        ctx.save_for_backward(x, temb, *weights)
        held = dict(zip(names, weights, strict=True))
        ctx.names, ctx.block = names, Block(module.size, shard, held, module.backend)
        return ctx.block.forward(x, temb, metadata)

    @staticmethod
    def backward(ctx, dout):
        _ = ctx.saved_tensors  # raises if one was changed in place since the forward
        found = ctx.block.backward(dout.contiguous())
        parameters = (found.parameters[name] for name in ctx.names)
        return None, None, None, None, found.dx, found.dtemb, *parameters


def add_parameter(module: nn.Module, path: list[str], value: Tensor) -> None:
    """Register a parameter under a dotted checkpoint name."""
    for name in path[:-1]:
        if name not in dict(module.named_children()):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    module.register_parameter(path[-1], nn.Parameter(value))
