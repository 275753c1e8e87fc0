"""One process plays every rank of a layout: 64 ranks in seconds, the same code, the same bytes.

For tests, notebooks and a first look at a layout; real processes are `h3lib run`.
"""

from __future__ import annotations

from collections.abc import Callable

from h3lib.canonical import canonical_tensors
from h3lib.compare import compare_record, summarise
from h3lib.contract import PUBLISHED, Contract, ModelSize
from h3lib.layout import Layout, Ownership
from h3lib.model.inputs import trace_block
from h3lib.model.packing import Packed
from h3lib.model.trace import Key, Record
from h3lib.model.weights import SyntheticWeights, WeightSource, digest
from h3lib.parallel.mesh import build_mesh
from h3lib.parallel.shard import SeqShard
from h3lib.parallel.transport import ThreadWorld
from h3lib.rows import LogicalRows


def canonical_block(
    size: ModelSize,
    packed: Packed,
    contract: Contract = PUBLISHED,
    seed: int = 0,
    source: WeightSource | None = None,
) -> dict:
    """Every named value of the block in a world of one, by (kind, name)."""
    source = source or SyntheticWeights(size, seed, packed.token_tags.device)
    num_rows = LogicalRows.of(packed.logical_keys).num_rows
    return canonical_tensors(
        trace_block(size, source, packed, SeqShard.canonical(num_rows, contract), seed)
    )


def play_layout(
    layout: Layout | str,
    size: ModelSize,
    packed: Packed,
    canonical: dict[Key, object],
    contract: Contract = PUBLISHED,
    seed: int = 0,
    source: WeightSource | None = None,
    change: Callable[[SeqShard, ThreadWorld], SeqShard] = lambda shard, world: shard,
    records: Callable[[int, list[Record]], list[Record]] = lambda rank, found: found,
) -> list[dict]:
    """Run every rank of a layout as a thread and compare it; the `tensors` of a report.

    `change` may replace a rank's place before it runs, `records` what it shows: the tests put
    their mutants there.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    source = source or SyntheticWeights(size, seed, packed.token_tags.device)
    owner = Ownership.of(layout, LogicalRows.of(packed.logical_keys).num_rows, contract)
    world = ThreadWorld(layout.num_ranks)

    def rank_main(rank: int):
        shard = change(SeqShard(owner, rank, build_mesh(layout, rank, world.connect)), world)
        found = records(rank, trace_block(size, source, packed, shard, seed))
        return [compare_record(record, canonical[record.kind, record.name]) for record in found]

    digests = {key: digest(value) for key, value in canonical.items()}
    return summarise(canonical, digests, world.run(rank_main))
