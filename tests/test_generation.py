"""The generation gate: velocities and latents of a rollout and of its replay, in every layout."""

import dataclasses
import functools

import pytest
from block_support import KEYFRAMES, TINY, packed_rows, red

from h3lib.contract import RowsError
from h3lib.layout import Layout
from h3lib.model.generation import GenerationProgram, first_different_step
from h3lib.model.packing import pack
from h3lib.model.sampler import Sampler
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.control import RingControl
from h3lib.simulate import canonical_values, play


@functools.cache
def _program(rows=132) -> GenerationProgram:
    packed = pack(KEYFRAMES) if rows == "keyframes" else packed_rows(rows)
    return GenerationProgram(TINY, SyntheticWeights(TINY), packed, points=4)


@functools.cache
def _canonical(rows=132) -> dict:
    return canonical_values(dataclasses.replace(_program(rows), replays=False))


@pytest.mark.parametrize("layout", ("tp1", "tp4-cp2-sp", "cp3-pp2"))
def test_layouts(layout):
    found = play(layout, _program(), _canonical())
    assert red(found) == set() and first_different_step(found) is None


def test_keyframes():
    assert red(play("tp2-cp2-sp", _program("keyframes"), _canonical("keyframes"))) == set()


def test_every_named_value_is_compared():
    found = {key: tuple(value.shape) for key, value in _canonical().items()}
    assert found == _program().values() and len(found) == 2 * 3 * 2 * 2


def test_steps_differ_from_each_other():
    """Or a sampler that stands still would pass."""
    digests = {name: value.double().sum().item() for (_, name), value in _canonical().items()}
    latents = [digests[f"rollout.{i}.video.latents"] for i in range(3)]
    assert len(set(latents)) == 3


@dataclasses.dataclass(frozen=True)
class _DriftingReplay(GenerationProgram):
    """A replay whose step 1 starts from other latents than the rollout had there."""

    @property
    def sampler(self):
        outer = super().sampler

        class Drifting(Sampler):
            calls = 0

            def step(self, latents, velocity, i):
                type(self).calls += 1
                if type(self).calls == outer.video.num_steps + 2:
                    velocity = velocity | {"audio": velocity["audio"] * (1 + 2**-20)}
                return super().step(latents, velocity, i)

        return Drifting(outer.job, outer.video, outer.audio)


def test_a_replay_that_leaves_the_trajectory_is_seen_at_its_step():
    given = (TINY, SyntheticWeights(TINY), packed_rows(132))
    found = play("tp1", _DriftingReplay(*given, points=4), _canonical())
    assert red(found) == {("output", "replay.1.audio.latents")}
    assert first_different_step(found) == 1


def test_an_arrival_order_is_seen_from_the_first_step_on():
    def ring(shard, world):
        tp = RingControl(world.connect((0, 1, 2, 3), shard.rank))
        return dataclasses.replace(shard, mesh=dataclasses.replace(shard.mesh, tp=tp))

    found = play("tp4", _program(), _canonical(), change=ring)
    assert first_different_step(found) == 0
    assert _program().control_keys()["tp"] in red(found)


def test_refusals():
    text_alone = dataclasses.replace(_program(), packed=packed_rows(7))
    with pytest.raises(RowsError, match="video rows of a generation: received 0"):
        text_alone.check_layout(Layout())
    with pytest.raises(RowsError, match="grid points of the sampler: received 1"):
        dataclasses.replace(_program(), points=1).check_layout(Layout())
