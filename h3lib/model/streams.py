"""Where the rows of video, audio and text lie: from three index sets to the rows of one rank.

A job comes as three tensors of rows and, for each, the packed position of every row. A rank holds
the rows of an index set that are among its slice; what it computes for them goes back to the order
of the index set, whatever layout, order of storage or padding. A row is known by its logical number
from one end to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h3lib.contract import ModelSize, RowsError
from h3lib.model.context import Rows
from h3lib.model.packing import Packed
from h3lib.ops.adaln import table_rows
from h3lib.ops.rope import rope_table
from h3lib.parallel.shard import SeqShard, coshard
from h3lib.rows import LogicalRows


@dataclass(frozen=True)
class Stream:
    """One index set of n rows.

    `order` `[n]`: which row of the set is the i-th in logical order; `logical` `[n]`: its logical
    row number, ascending; `cuts`: how the n rows are spread over the ranks of the mesh axis `rows`.
    """

    shard: SeqShard
    order: Tensor
    logical: Tensor
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, shard: SeqShard, numbers: Tensor) -> Stream:
        """The stream whose rows have these logical numbers `[n]`, in any order."""
        logical, order = numbers.sort()
        edges = torch.tensor(shard.owner.row_cuts(), device=numbers.device)
        return cls(shard, order, logical, tuple(torch.searchsorted(logical, edges).tolist()))

    @property
    def here(self) -> slice:
        """The rows of the stream that are in this rank's slice."""
        member = self.shard.mesh.rows.rank
        return slice(self.cuts[member], self.cuts[member + 1])

    @property
    def logical_here(self) -> Tensor:
        return self.logical[self.here]

    def take(self, rows: Tensor) -> Tensor:
        """This rank's rows of the stream, ascending, from all of them in the set's order."""
        return rows[self.order[self.here]]

    def sorted(self, rows: Tensor) -> Tensor:
        """All rows of the stream in logical order."""
        return rows[self.order]

    def put(self, x_SD: Tensor, rows: Tensor) -> None:
        """Write this rank's rows of the stream into its slice."""
        x_SD[self.logical_here - self.shard.slice_rows.start] = rows

    def pick(self, x_SD: Tensor) -> Tensor:
        """This rank's rows of the stream from its slice."""
        return x_SD[self.logical_here - self.shard.slice_rows.start]

    def gather(self, rows: Tensor) -> Tensor:
        """All rows of the stream in logical order, from every rank's: an all-gather of rows."""
        return self.shard.mesh.rows.all_gather_rows(rows.contiguous(), self.cuts)

    def unsorted(self, rows: Tensor) -> Tensor:
        """Rows in logical order back to the order of the index set."""
        out = torch.empty_like(rows)
        out[self.order] = rows
        return out


@dataclass(frozen=True)
class Streams:
    """The three index sets, and the metadata of this rank's rows; `timestep_rows` `[S]`."""

    video: Stream
    audio: Stream
    text: Stream
    rows: Rows
    timestep_rows: Tensor

    @classmethod
    def of(
        cls, shard: SeqShard, packed: Packed, size: ModelSize, dtype: torch.dtype
    ) -> Streams:
        """**Raises:** RowsError unless the index sets together are the active rows, each once."""
        rows = LogicalRows.of(packed.logical_keys)
        sets = (packed.video_indices, packed.audio_indices, packed.text_indices)
        numbers = logical_numbers(rows, torch.cat(sets))
        video, audio, text = numbers.split([len(indices) for indices in sets])
        if not len(text):
            raise RowsError("number of text rows", 0, "at least 1")
        table = table_rows(packed.timestep_indices, packed.token_tags, len(packed.timestep))
        table, timestep_rows = coshard(shard, rows, table, packed.timestep_indices)
        cos, sin = rope_table(rows.gather(packed.position_ids), size, dtype)
        own = slice(shard.shard_rows.start, shard.shard_rows.stop)
        return cls(
            *(Stream.of(shard, part) for part in (video, audio, text)),
            Rows(table, cos[own], sin[own]),
            timestep_rows,
        )


def logical_numbers(rows: LogicalRows, indices: Tensor) -> Tensor:
    """Logical number of each packed index `[n]`.

    **Raises:** RowsError unless the indices are the packed positions of the active rows, each once.
    """
    numbers = torch.full((rows.num_packed,), -1, device=indices.device)
    active = torch.arange(rows.num_rows, device=indices.device)
    numbers[active if rows.order is None else rows.order] = active
    inside = (indices >= 0) & (indices < rows.num_packed)
    if not bool(inside.all()):
        outside = indices[~inside][0].item()
        raise RowsError("index of a row", outside, f"0 to {rows.num_packed - 1}")
    found = numbers[indices]
    if not torch.equal(found.sort().values, active):
        seen = torch.bincount(found[found >= 0], minlength=rows.num_rows)
        wrong = (seen != 1).nonzero()[:3, 0].tolist() or indices[found < 0][:3].tolist()
        accepted = "every active row in one of video, audio and text indices, and no padded row"
        raise RowsError("rows in none or several index sets, or padded", wrong, accepted)
    return found
