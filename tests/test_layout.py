"""Layout names, the rank grid and ownership: what exists, what is refused, who owns what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3lib.contract import Contract, LayoutError
from h3lib.layout import Layout, Ownership, region_shape, whole

TP, CP = (1, 2, 4, 8), tuple(range(1, 9))
COMBINATIONS = [Layout(tp, cp, sp) for tp in TP for cp in CP for sp in (False, True)]
SMALL = Contract(row_block=4, key_block=16)


def node_shapes(tp: int, cp: int) -> list[int]:
    """Local sizes of section 5: nodes of equal size that divides tp or is a multiple of it."""
    ranks = tp * cp
    sizes = (n for n in range(1, ranks + 1) if ranks % n == 0)
    return [n for n in sizes if tp % n == 0 or n % tp == 0]


def test_64_combinations_have_64_names_that_read_back():
    names = [layout.name for layout in COMBINATIONS]
    assert len(set(names)) == len(names) == 64
    assert [Layout.parse(name) for name in names] == COMBINATIONS


def test_every_node_shape_has_a_name_that_reads_back():
    for tp in TP:
        for cp in CP:
            for local in node_shapes(tp, cp):
                layout = Layout(tp, cp, True, local)
                assert Layout.parse(layout.name) == layout
                assert layout.name.endswith(f"local{local}")
                assert layout.num_nodes * local == layout.num_ranks


def test_every_other_node_shape_is_refused():
    for tp in TP:
        for cp in CP:
            for local in set(range(0, tp * cp + 9)) - set(node_shapes(tp, cp)):
                with pytest.raises(LayoutError, match=f"local size: received {local}; "):
                    Layout(tp, cp, False, local)


@pytest.mark.parametrize(
    "name,layout",
    [
        ("tp1", Layout()),
        ("cp1", Layout()),
        ("tp1-cp1", Layout()),
        ("tp1-cp3", Layout(1, 3)),
        ("cp7-sp", Layout(1, 7, True)),
        ("tp4-cp2-sp", Layout(4, 2, True)),
        ("tp8-local4", Layout(8, 1, False, 4)),
        ("tp8-cp2-sp-local16", Layout(8, 2, True, 16)),
        ("tp1-local1", Layout(local_size=1)),
    ],
)
def test_names_that_exist(name, layout):
    assert Layout.parse(name) == layout


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "sp", "local4", "4", "tp", "tp-4", "tp04", "cp01", "TP4", "tp4 ", " tp4"),
        *("tp4\n", "tp4-", "tp4--cp2", "tp4_cp2", "cp2-tp4", "tp4-sp-cp2", "tp4-local2-sp"),
        *("tp4-tp4", "tp4-cp2-cp2", "tp+4", "tp4.0", "tp-1", "tp4-ep2", "tp4-cp2-spx", "tp8-local"),
        *(None, 4, b"tp4", ("tp4",)),
    ],
)
def test_names_that_do_not_parse_are_refused_with_the_grammar(name):
    with pytest.raises(LayoutError, match="layout name: received .*e.g. tp4-cp2-sp") as caught:
        Layout.parse(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "name,reason",
    [
        ("tp3", "tp degree: received 3; accepted: 1, 2, 4, 8"),
        ("tp0", "tp degree: received 0; accepted: 1, 2, 4, 8"),
        ("tp16", "tp degree: received 16"),
        ("cp0", "cp degree: received 0; accepted: 1 to 8"),
        ("cp9", "cp degree: received 9; accepted: 1 to 8"),
        ("tp4-cp12-sp", "cp degree: received 12"),
        ("tp8-local3", "local size: received 3; accepted: a divisor or a multiple of tp = 8"),
        ("tp8-local0", "local size: received 0"),
        ("tp8-local16", "local size: received 16; accepted: a divisor of the number of ranks 8"),
        ("tp2-cp3-local4", "received 4; accepted: a divisor of the number of ranks 6"),
        ("tp2-cp3-local3", "received 3; accepted: a divisor or a multiple of tp = 2"),
    ],
)
def test_degrees_that_cannot_exist_are_refused_with_the_reason(name, reason):
    with pytest.raises(LayoutError, match=reason):
        Layout.parse(name)


@pytest.mark.parametrize("layout", COMBINATIONS, ids=lambda layout: layout.name)
def test_ranks_are_cp_major_and_groups_partition_them(layout):
    ranks = range(layout.num_ranks)
    assert [layout.place(r) for r in ranks] == [
        (c, t) for c in range(layout.cp) for t in range(layout.tp)
    ]
    for rank in ranks:
        cp_rank, tp_rank = layout.place(rank)
        assert layout.tp_group(rank)[tp_rank] == layout.cp_group(rank)[cp_rank] == rank
        assert {layout.place(r)[0] for r in layout.tp_group(rank)} == {cp_rank}
        assert {layout.place(r)[1] for r in layout.cp_group(rank)} == {tp_rank}
        assert len(layout.tp_group(rank)) == layout.tp
        assert len(layout.cp_group(rank)) == layout.cp


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside_the_layout_is_refused(rank):
    with pytest.raises(LayoutError, match=f"rank: received {rank}; accepted: 0 to 7 in tp4-cp2"):
        Layout(4, 2).place(rank)


def test_a_group_holds_the_same_local_ranks_on_every_node_it_touches():
    for tp in TP:
        for cp in CP:
            for local in node_shapes(tp, cp):
                layout = Layout(tp, cp, False, local)
                assert [layout.node(r) for r in range(tp * cp)] == [
                    r // local for r in range(tp * cp)
                ]
                for rank in range(tp * cp):
                    for group in (layout.tp_group(rank), layout.cp_group(rank)):
                        places = {}
                        for member in group:
                            places.setdefault(layout.node(member), []).append(member % local)
                        assert len({tuple(p) for p in places.values()}) == 1


def test_feature_and_sequence_units_are_cut_as_published():
    for layout in COMBINATIONS:
        owner = Ownership.of(layout, 1097, SMALL)
        assert owner.feature_cuts() == tuple(8 * r // layout.tp for r in range(layout.tp + 1))
        assert owner.sequence_cuts() == tuple(8 * c // layout.cp for c in range(layout.cp + 1))


def test_row_units_under_sp_are_cut_from_the_first_of_the_shard():
    for layout in COMBINATIONS:
        owner = Ownership.of(layout, 300, SMALL)
        expected = []
        for c in range(layout.cp):
            start, stop = 8 * (8 * c // layout.cp), 8 * (8 * (c + 1) // layout.cp)
            slices = layout.tp if layout.sp else 1
            expected += [start + (stop - start) * t // slices for t in range(slices)]
        assert owner.row_unit_cuts() == (*expected, 64)


@given(st.integers(1, 1300), st.sampled_from(COMBINATIONS), st.sampled_from([SMALL, Contract()]))
def test_rows_of_shards_and_slices_partition_the_rows(num_rows, layout, contract):
    owner = Ownership.of(layout, num_rows, contract)
    shards = owner.shard_row_cuts()
    assert (shards[0], shards[-1], len(shards)) == (0, num_rows, layout.cp + 1)
    assert list(shards) == sorted(shards)
    for c in range(layout.cp):
        units = range(8 * c // layout.cp, 8 * (c + 1) // layout.cp)
        rows = owner.rows.sequence_unit_rows(units)
        assert len(rows) == shards[c + 1] - shards[c]
        assert not rows or rows.start == shards[c]
        if layout.sp:
            slices = owner.slice_row_cuts(c)
            assert (slices[0], slices[-1]) == shards[c : c + 2]
            assert list(slices) == sorted(slices)
            assert len(slices) == layout.tp + 1
            assert all(row % contract.row_block == 0 for row in slices if row != num_rows)


def test_one_row_on_64_ranks_is_owned_once():
    owner = Ownership.of(Layout(8, 8, True), 1, Contract())
    assert owner.shard_row_cuts() == (0,) * 8 + (1,)
    assert owner.slice_row_cuts(7) == (0,) * 8 + (1,)
    assert owner.slice_row_cuts(0) == (0,) * 9


def test_tp_degree_must_divide_the_feature_units():
    assert Ownership.of(Layout(4), 64, Contract(num_units=4)).feature_cuts() == (0, 1, 2, 3, 4)
    with pytest.raises(LayoutError, match="tp degree: received 8; .*divisor of num_units = 4"):
        Ownership.of(Layout(8), 64, Contract(num_units=4))


def test_regions_of_a_tensor():
    assert whole((3, 4)) == ((range(3),), (range(4),))
    assert region_shape(((range(2, 4), range(8, 9)), (range(5),))) == (3, 5)


def _staged() -> list[Layout]:
    return [Layout(tp, cp, cp == 2, pp=pp) for tp in (1, 4) for cp in (1, 2, 3) for pp in (1, 2, 5)]


def test_stages_have_names_that_read_back():
    for layout in _staged():
        assert Layout.parse(layout.name) == layout
        assert layout.name.endswith(f"pp{layout.pp}") == (layout.pp > 1)
    assert Layout.parse("tp4-cp2-sp-pp2-local4") == Layout(4, 2, True, 4, 2)
    for name in ("pp2", "tp2-local2-pp2", "tp2-pp02", "pp2-tp2"):
        with pytest.raises(LayoutError, match="layout name"):
            Layout.parse(name)


def test_stages_are_outermost_and_their_groups_partition_the_ranks():
    for layout in _staged():
        ranks = range(layout.num_ranks)
        assert layout.num_ranks == layout.tp * layout.cp * layout.pp
        places = {(layout.stage(r), *layout.place(r)) for r in ranks}
        assert len(places) == layout.num_ranks
        for rank in ranks:
            stage, (cp_rank, tp_rank) = layout.stage(rank), layout.place(rank)
            assert rank == (stage * layout.cp + cp_rank) * layout.tp + tp_rank
            assert layout.pp_group(rank)[stage] == rank
            assert layout.stage_group(rank)[rank % layout.stage_size] == rank
            for group in (layout.tp_group(rank), layout.cp_group(rank)):
                assert {layout.stage(member) for member in group} == {stage} and rank in group


def test_layers_of_stages_are_contiguous_and_all_there():
    for pp in range(1, 8):
        parts = [Layout(pp=pp).layers(7, stage) for stage in range(pp)]
        assert [layer for part in parts for layer in part] == list(range(7))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_stages_that_cannot_exist():
    with pytest.raises(LayoutError, match="pp degree: received 0"):
        Layout(pp=0)
    with pytest.raises(LayoutError, match="pp degree: received 8; accepted: at most .* 7"):
        Layout(pp=8).layers(7, 0)
    for local, fits in ((4, True), (12, True), (24, True), (8, False)):
        if fits:
            assert Layout(4, 3, local_size=local, pp=2).num_nodes == 24 // local
        else:  # a node would hold one stage and a part of the next
            with pytest.raises(LayoutError, match="the 12 ranks of a stage"):
                Layout(4, 3, local_size=local, pp=2)
