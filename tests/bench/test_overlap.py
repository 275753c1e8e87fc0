"""The benchmark of overlap without a GPU: threads, the tiny size, the eager back end."""

import pytest
import torch

from h3lib.bench.overlap import LEFT_OUT, WITHOUT, Case
from h3lib.layout import Layout
from h3lib.parallel.transport import ThreadWorld


@pytest.mark.parametrize("name", ("tp2", "tp2-sp", "cp2"))
def test_communication_is_left_out_and_nothing_else(name):
    """Shapes and dtypes stay; under tp every rank's sum lacks the others' part."""
    world = ThreadWorld(2, 60)

    def main(rank: int):
        level = world.connect(range(2), rank)
        case = Case(level, Layout.parse(name), 131, "tiny", "cpu", "eager")
        elements, different = case.compare()
        whole, partial = (case.call(which, backward=True)() for which in (WITHOUT, LEFT_OUT))
        assert whole.keys() == partial.keys()
        for key, value in whole.items():
            assert (value.shape, value.dtype) == (partial[key].shape, partial[key].dtype), key
        return elements, different, torch.equal(whole["dx"], partial["dx"])

    for elements, different, same in world.run(main):
        assert elements > 10_000 and different == 0 and not same
