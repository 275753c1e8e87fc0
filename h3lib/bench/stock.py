"""The block in stock PyTorch, alone and as tensor and context parallel code is usually written.

Library calls throughout: `F.linear`, `F.rms_norm`, `F.scaled_dot_product_attention`. One process
plays the ranks: each computes its heads, FFN columns and rows with operands of their local shapes,
and row-parallel partials in the operands' dtype are added in rank order, as an all-reduce does. It
is what this project is measured against, and what a gate must be able to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from h3lib.contract import NUM_MODALITIES, NUM_MODULATIONS, ModelSize
from h3lib.model.inputs import BlockInputs
from h3lib.ops.rope import rotary_forward

Linear = Callable[[Tensor, Tensor], Tensor]
"""y = x @ w^T of x `[T, K]` and w `[N, K]`."""


@dataclass(frozen=True)
class StockBlock:
    """The forward of block 0 with `tp` x `cp` ranks; `linear` computes every product."""

    size: ModelSize
    weights: dict[str, Tensor]
    tp: int = 1
    cp: int = 1
    linear: Linear = F.linear

    def forward(self, given: BlockInputs) -> Tensor:
        """The output `[T, D]`. **Order:** the libraries'."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self._modulation(given)
        a = self._norm("norm1", given.x) * (1 + scale1) + shift1
        x = given.x + gate1 * self._row_parallel("attn.to_out.0", self._attention(a, given))
        a = self._norm("norm2", x) * (1 + scale2) + shift2
        return x + gate2 * self._row_parallel("ff.net.2", self._feed_forward(a))

    def _modulation(self, given: BlockInputs) -> tuple[Tensor, ...]:
        name = "adaln_proj.linear"
        s = F.silu(given.temb).to(given.x.dtype)
        table = F.linear(s, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
        table = table.view(NUM_MODALITIES * len(s), NUM_MODULATIONS, self.size.hidden_size)
        return table[given.rows.table_rows].unbind(1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.size.norm_eps)

    def _column_parallel(self, x: Tensor, w: Tensor) -> Tensor:
        """Every rank's rows times every rank's outputs."""
        ranks = [[self.linear(part, own) for own in w.chunk(self.tp)] for part in x.chunk(self.cp)]
        return torch.cat([torch.cat(columns, dim=-1) for columns in ranks])

    def _row_parallel(self, name: str, x: Tensor) -> Tensor:
        """Partials of every rank's inputs, rounded to the dtype and added in rank order."""
        owned = self.weights[f"{name}.weight"].chunk(self.tp, dim=1)

        def summed(part: Tensor) -> Tensor:
            pairs = zip(part.chunk(self.tp, dim=1), owned, strict=True)
            return reduce(torch.add, [self.linear(a.contiguous(), w) for a, w in pairs])

        return torch.cat([summed(part) for part in x.chunk(self.cp)])

    def _attention(self, a: Tensor, given: BlockInputs) -> Tensor:
        heads = (self.size.num_attention_heads, self.size.attention_head_dim)
        q, k, v = (
            self._column_parallel(a, self.weights[f"attn.to_{name}.weight"]).unflatten(-1, heads)
            for name in "qkv"
        )
        q, k = (
            rotary_forward(self._norm(f"attn.norm_{name}", x), given.rows.cos, given.rows.sin)
            for name, x in (("q", q), ("k", k))
        )
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        parts = [
            F.scaled_dot_product_attention(part.transpose(0, 1)[None], k, v)[0].transpose(0, 1)
            for part in q.chunk(self.cp)
        ]
        return torch.cat(parts).flatten(1)

    def _feed_forward(self, a: Tensor) -> Tensor:
        w_value, w_gate = self.weights["ff.net.0.proj.weight"].chunk(2)
        value, gate = (self._column_parallel(a, w) for w in (w_value, w_gate))
        return value * F.silu(gate)
