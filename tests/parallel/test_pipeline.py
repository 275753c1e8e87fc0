"""The pipeline axis: hand-offs to the neighbours, results of one stage on all of them."""

import pytest
import torch
from support import assert_same_bytes, special

from h3lib.contract import PeerError
from h3lib.layout import Layout
from h3lib.parallel.mesh import build_mesh, mesh_groups
from h3lib.parallel.pipeline import Pipeline
from h3lib.parallel.transport import ThreadWorld

LAYOUT = Layout.parse("tp2-pp3")
X = {rank: special(rank, 5, 7, dtype=torch.bfloat16) for rank in (0, 1)}


def _run(function):
    world = ThreadWorld(LAYOUT.num_ranks)
    meshes = [build_mesh(LAYOUT, rank, world.connect) for rank in range(LAYOUT.num_ranks)]
    return world.run(lambda rank: function(rank, meshes[rank].pp))


def test_activations_pass_every_stage_and_gradients_come_back():
    def rank_main(rank, pp):
        x = X[rank] if pp.is_first else pp.receive_forward((5, 7), X[0])
        if not pp.is_last:
            pp.send_forward(x)
        back = x if pp.is_last else pp.receive_back((5, 7), X[0])
        if not pp.is_first:
            pp.send_back(back)
        return x, back

    for rank, pair in enumerate(_run(rank_main)):
        for value in pair:
            assert_same_bytes(value, X[rank % 2], f"rank {rank}")


@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("rows", (5, 0))
def test_results_of_one_stage_are_on_all(stage, rows):
    def rank_main(rank, pp):
        own = X[rank % 2][:rows] if pp.stage == stage else None
        return pp.from_stage(stage, own, (rows, 7), X[0])

    for rank, found in enumerate(_run(rank_main)):
        assert_same_bytes(found, X[rank % 2][:rows])


@pytest.mark.parametrize("expected", ((5, 6), (7, 5)), ids=("fewer elements", "transposed"))
def test_another_shape_than_the_neighbour_expects_is_refused(expected):
    def rank_main(rank, pp):
        if pp.is_first:
            pp.send_forward(X[rank])
        elif pp.stage == 1:
            pp.receive_forward(expected, X[0])

    with pytest.raises(PeerError, match="hand-off between stages|shape"):
        _run(rank_main)


def test_a_world_of_one_is_first_and_last():
    alone = Pipeline()
    assert alone.is_first and alone.is_last and alone.from_stage(0, X[0], (5, 7), X[0]) is X[0]


def test_groups_of_stages_are_opened_by_all_ranks():
    groups = mesh_groups(LAYOUT)
    assert {(0, 2, 4), (1, 3, 5), (0, 2), (2, 4), (1, 3), (3, 5)} <= set(groups)
    assert {(0, 1), (2, 3), (4, 5)} <= set(groups) and len(groups) == len(set(groups))
