"""One process plays every rank of a layout: 64 ranks in seconds, the same code, the same bytes.

For tests, notebooks and a first look at a layout; real processes are `h3lib run`.
"""

from __future__ import annotations

from collections.abc import Callable

from h3lib.canonical import canonical_tensors
from h3lib.compare import compare_record, summarise
from h3lib.contract import PUBLISHED, Contract, ModelSize
from h3lib.layout import Layout, Ownership
from h3lib.model.packing import Packed
from h3lib.model.program import BlockProgram, Program
from h3lib.model.trace import GRADIENT, OUTPUT, Key, Record
from h3lib.model.weights import SyntheticWeights, WeightSource, digest
from h3lib.parallel.mesh import build_mesh
from h3lib.parallel.shard import SeqShard
from h3lib.parallel.transport import ThreadWorld
from h3lib.rows import LogicalRows

Change = Callable[[SeqShard, ThreadWorld], SeqShard]
Records = Callable[[int, list[Record]], list[Record]]


def canonical_values(program: Program, contract: Contract = PUBLISHED) -> dict:
    """Every named value of a program in a world of one, by (kind, name)."""
    num_rows = LogicalRows.of(program.packed.logical_keys).num_rows
    return canonical_tensors(program.records(SeqShard.canonical(num_rows, contract)))


def play(
    layout: Layout | str,
    program: Program,
    canonical: dict[Key, object],
    contract: Contract = PUBLISHED,
    change: Change = lambda shard, world: shard,
    records: Records = lambda rank, found: found,
    traced: bool = True,
) -> list[dict]:
    """Run every rank of a layout as a thread and compare it; the `tensors` of a report.

    Without `traced`, outputs and gradients of a run that keeps nothing else. `change` may replace a
    rank's place before it runs, `records` what it shows: the tests put their mutants there.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    program.check_layout(layout)
    owner = Ownership.of(layout, LogicalRows.of(program.packed.logical_keys).num_rows, contract)
    world = ThreadWorld(layout.num_ranks)

    def rank_main(rank: int):
        shard = change(SeqShard(owner, rank, build_mesh(layout, rank, world.connect)), world)
        found = records(rank, program.records(shard) if traced else program.untraced(shard))
        return [compare_record(record, canonical[record.kind, record.name]) for record in found]

    if not traced:
        canonical = {key: value for key, value in canonical.items() if key[0] in (OUTPUT, GRADIENT)}
    digests = {key: digest(value) for key, value in canonical.items()}
    return summarise(canonical, digests, world.run(rank_main), layout.pp)


def canonical_block(
    size: ModelSize,
    packed: Packed,
    contract: Contract = PUBLISHED,
    seed: int = 0,
    source: WeightSource | None = None,
) -> dict:
    """Every named value of block 0 in a world of one, by (kind, name)."""
    return canonical_values(_block(size, packed, seed, source), contract)


def play_layout(
    layout: Layout | str,
    size: ModelSize,
    packed: Packed,
    canonical: dict[Key, object],
    contract: Contract = PUBLISHED,
    seed: int = 0,
    source: WeightSource | None = None,
    **mutants,
) -> list[dict]:
    """`play` block 0 in a layout, with synthetic weights unless there is a `source`."""
    return play(layout, _block(size, packed, seed, source), canonical, contract, **mutants)


def _block(size: ModelSize, packed: Packed, seed: int, source: WeightSource | None) -> Program:
    source = source or SyntheticWeights(size, seed, packed.token_tags.device)
    return BlockProgram(size, source, packed, seed)
