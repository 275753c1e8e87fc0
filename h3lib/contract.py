"""The contract `h3-parallel-v1`: units, the tree, row blocks, model sizes and typed errors.

A layout decides *where* an addition happens, never *which* additions happen, in which order, or
where a value is rounded. This file fixes what is cut and how it is added, before any rank exists:

* a feature axis is cut into `num_units` equal contiguous *feature units*;
* rows are cut into *key blocks*, key blocks into eight *sequence units*, and each sequence unit
  into eight *row units* of whole *row blocks*;
* leaves are added in one balanced binary tree, the lower index on the left.

Standard library only: everything above this file may import it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

CONTRACT_ID = "h3-parallel-v1"
NUM_SEQUENCE_UNITS = 8
ROW_UNITS_PER_SEQUENCE_UNIT = 8
NUM_ROW_UNITS = NUM_SEQUENCE_UNITS * ROW_UNITS_PER_SEQUENCE_UNIT
NUM_MODALITIES = 3  # video 0, text 1, audio 2
NUM_MODULATIONS = 6  # shift, scale, gate before attention; shift, scale, gate before the FFN


class H3Error(Exception):
    """Base of every error raised on purpose: it names the value received and those accepted."""

    def __init__(self, subject: str, received: object, accepted: object):
        self.subject, self.received, self.accepted = subject, received, accepted
        super().__init__(f"{subject}: received {received!r}; accepted: {accepted}")

    def __reduce__(self):
        return type(self), (self.subject, self.received, self.accepted)


class ContractError(H3Error, ValueError):
    """A block size, unit count or model size that the contract cannot cut."""


class LayoutError(H3Error, ValueError):
    """A layout name, degree or node shape that cannot exist."""


class RowsError(H3Error, ValueError):
    """Logical keys, row counts or jobs that cannot be ordered."""


class OperandError(H3Error, ValueError):
    """An operand with a dtype, shape, device or stride that an op does not accept."""


class BackendError(H3Error, ValueError):
    """A back end that does not exist or does not implement the op."""


class CheckpointError(H3Error, ValueError):
    """A checkpoint that is truncated, mis-shaped, mis-typed or incomplete."""


class PeerError(H3Error, RuntimeError):
    """A rank that disagrees with its peers, failed, or did not answer in time."""


class ReportError(H3Error, ValueError):
    """A report that is incomplete, invalid, or not a report."""


@dataclass(frozen=True)
class Contract:
    """The block sizes of one contract; the defaults are the published ones, tests shrink them.

    `mma_k` is the depth of one matrix instruction: a key block is a multiple of it.
    """

    num_units: int = 8
    row_block: int = 64
    key_block: int = 128
    mma_k: int = 16

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(field.name, value, "a positive integer")
        if self.num_units & (self.num_units - 1):
            raise ContractError("num_units", self.num_units, "a power of two: the tree is balanced")
        for name in ("row_block", "mma_k"):
            if self.key_block % getattr(self, name):
                raise ContractError(
                    "key_block", self.key_block, f"a multiple of {name} = {getattr(self, name)}"
                )

    @property
    def id(self) -> str:
        """The contract's name; block sizes that differ from the published ones are part of it."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "/".join([CONTRACT_ID, *changed])


PUBLISHED = Contract()
"""The published block sizes."""


def subtree_roots(start: int, stop: int, num_leaves: int) -> tuple[range, ...]:
    """Maximal complete subtrees of the balanced tree over `num_leaves` that fill [start, stop).

    TP4 rank 1 owns units 2, 3: one root. CP3 rank 1 owns units 2, 3, 4: roots [2, 4) and [4, 5).

    **Order:** ascending. **Raises:** ContractError if the leaves are not a part of the tree.
    """
    if num_leaves < 1 or num_leaves & (num_leaves - 1):
        raise ContractError("number of leaves", num_leaves, "a power of two")
    if not 0 <= start <= stop <= num_leaves:
        raise ContractError("leaf range", (start, stop), f"0 <= start <= stop <= {num_leaves}")
    roots = []
    while start < stop:
        width = start & -start or num_leaves
        while start + width > stop:
            width //= 2
        roots.append(range(start, start + width))
        start += width
    return tuple(roots)


@dataclass(frozen=True)
class RowUnits:
    """How `num_rows` active rows are cut: key blocks, sequence units, row blocks, row units."""

    num_rows: int
    contract: Contract = PUBLISHED

    def __post_init__(self):
        if not isinstance(self.num_rows, int) or self.num_rows is True or self.num_rows < 1:
            raise RowsError("number of active rows", self.num_rows, "at least 1")

    @property
    def num_key_blocks(self) -> int:
        return -(-self.num_rows // self.contract.key_block)

    @property
    def num_row_blocks(self) -> int:
        return -(-self.num_rows // self.contract.row_block)

    def sequence_unit_blocks(self, unit: int) -> range:
        """Row blocks of one sequence unit, possibly none."""
        per_key_block = self.contract.key_block // self.contract.row_block
        edges = (
            min(
                per_key_block * (s * self.num_key_blocks // NUM_SEQUENCE_UNITS), self.num_row_blocks
            )
            for s in (unit, unit + 1)
        )
        return range(*edges)

    def row_unit_blocks(self, unit: int) -> range:
        """Row blocks of one of the 64 row units, possibly none."""
        sequence_unit, part = divmod(unit, ROW_UNITS_PER_SEQUENCE_UNIT)
        blocks = self.sequence_unit_blocks(sequence_unit)
        cut = [
            blocks.start + k * len(blocks) // ROW_UNITS_PER_SEQUENCE_UNIT for k in (part, part + 1)
        ]
        return range(*cut)

    def block_rows(self, blocks: range) -> range:
        """Rows of a run of row blocks; only the last block of all may be cut short."""
        size = self.contract.row_block
        return range(
            min(blocks.start * size, self.num_rows), min(blocks.stop * size, self.num_rows)
        )

    def sequence_unit_rows(self, units: range) -> range:
        """Rows of a run of sequence units."""
        return _unit_rows(self, units, RowUnits.sequence_unit_blocks)

    def row_unit_rows(self, units: range) -> range:
        """Rows of a run of row units."""
        return _unit_rows(self, units, RowUnits.row_unit_blocks)


@functools.lru_cache(maxsize=4096)
def _unit_rows(rows: RowUnits, units: range, blocks_of) -> range:
    """Kept: every launch of a row fold asks for them."""
    if not units:
        return range(0)
    return rows.block_rows(range(blocks_of(rows, units[0]).start, blocks_of(rows, units[-1]).stop))


@dataclass(frozen=True)
class ModelSize:
    """The widths of one MiniMax-H3 configuration, named as in the diffusers configuration."""

    name: str
    hidden_size: int
    num_attention_heads: int
    attention_head_dim: int
    ffn_dim: int
    time_embed_dim: int
    time_embed_hidden_dim: int
    freq_dim: int
    rope_freq_dim: int
    text_dim: int
    num_layers: int
    num_refiner_layers: int = 2
    in_channels: int = 24
    patch_size: tuple[int, int, int] = (1, 2, 2)
    audio_in_channels: int = 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def inner_dim(self) -> int:
        """Width of q, k and v: heads x head dim, larger than `hidden_size`."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def video_dim(self) -> int:
        """Values of one video row: channels of one patch."""
        frames, height, width = self.patch_size
        return self.in_channels * frames * height * width

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated: two halves of (t, h, w) angles."""
        return 2 * 3 * self.rope_freq_dim

    @property
    def adaln_dim(self) -> int:
        """Outputs of one block's AdaLN linear: modality x modulation x channel."""
        return NUM_MODALITIES * NUM_MODULATIONS * self.hidden_size

    def check(self, contract: Contract, device: str = "cpu") -> None:
        """**Raises:** ContractError if a reduced axis does not divide into the contract's units."""
        for axis in ("num_attention_heads", "ffn_dim", "adaln_dim"):
            width = getattr(self, axis)
            if width % contract.num_units:
                raise ContractError(axis, width, f"a multiple of num_units = {contract.num_units}")
        if 2 * self.hidden_size % contract.num_units:  # outputs of the last AdaLN linear
            accepted = f"2 * hidden_size a multiple of num_units = {contract.num_units}"
            raise ContractError("hidden_size", self.hidden_size, accepted)
        if self.rotary_dim > self.attention_head_dim:
            raise ContractError("rotary_dim", self.rotary_dim, f"at most {self.attention_head_dim}")
        if device == "cuda":
            for axis in ("inner_dim", "ffn_dim"):
                unit = getattr(self, axis) // contract.num_units
                if unit % contract.mma_k:
                    raise ContractError(
                        f"width of a feature unit of {axis}",
                        unit,
                        f"a multiple of {contract.mma_k}",
                    )


SIZES = {
    size.name: size
    for size in (
        ModelSize("full", 5376, 56, 128, 14336, 2688, 5376, 256, 16, 5120, 50),
        # One GPU: the released head dim and two heads a unit, everything else about a quarter.
        ModelSize("small", 1536, 16, 128, 4096, 768, 1536, 256, 16, 1280, 4),
        # CPU: two heads a unit (one would hide the order over heads), inner wider than hidden,
        # rotary on 24 of 32 channels.
        ModelSize("tiny", 96, 16, 32, 256, 48, 96, 32, 4, 80, 2),
    )
}


def model_size(name: str) -> ModelSize:
    """The configuration called `name`. **Raises:** ContractError for any other name."""
    if name not in SIZES:
        raise ContractError("size", name, ", ".join(SIZES))
    return SIZES[name]
