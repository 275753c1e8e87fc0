"""Coverage: the pieces that ranks show must be the whole, judged beside a brute-force count."""

import random

import pytest
import torch

from h3lib.compare import _covered
from h3lib.layout import whole

SHAPE = (6, 8)


def _brute(pieces) -> bool:
    seen = torch.zeros(SHAPE, dtype=torch.bool)
    for rows, columns in pieces:
        for row in (i for part in rows for i in part):
            for column in (i for part in columns for i in part):
                seen[row, column] = True
    return bool(seen.all())


def _ranges(draw, size):
    """One range, or two apart, as a gated column has."""
    cuts = sorted(draw.sample(range(size + 1), draw.choice((2, 4))))
    return tuple(range(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True))


def test_regions_cover_the_whole_as_a_brute_force_count_says():
    draw, verdicts = random.Random(0), []
    for _ in range(3000):
        regions = [tuple(_ranges(draw, n) for n in SHAPE) for _ in range(draw.randint(1, 14))]
        pieces = {(region, None, sum(map(len, region[0])) * sum(map(len, region[1])))
                  for region in regions}  # fmt: skip
        verdicts.append(_covered(SHAPE, pieces))
        assert verdicts[-1] == _brute(regions)
    assert {True, False} == set(verdicts)


@pytest.mark.parametrize(
    "slices, covered",
    [([(0, 48)], True), ([(0, 20), (20, 28)], True), ([(20, 28), (0, 21)], True),
     ([(0, 20), (21, 27)], False), ([(0, 47)], False), ([(1, 47)], False), ([], False)],
)  # fmt: skip
def test_slices_of_a_region_must_have_no_gap(slices, covered):
    assert _covered(SHAPE, {(whole(SHAPE), start, length) for start, length in slices}) == covered


def test_a_rank_without_rows_takes_nothing_from_the_others():
    left, none = whole((6, 8)), ((range(6, 6),), (range(8),))
    assert _covered(SHAPE, {(left, None, 48), (none, None, 0)})
    assert not _covered(SHAPE, {(none, None, 0)})
