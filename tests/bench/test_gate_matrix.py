"""The gate counts, the stock block misses, and the committed matrix has every cell."""

import itertools
import json

from h3lib.bench.gate_matrix import DTYPES, LAYOUTS, ROWS, SEEDS, measure
from h3lib.book import ROOT


def test_a_cell_is_equal_where_the_stock_block_is_not():
    for cell in measure(("tp4-cp2-sp",), ("bfloat16", "float64"), (65,), (3,))["cells"]:
        assert cell["values_equal"] == cell["values"] > 70 and cell["different"] == 0
        assert cell["elements"] > 10**6
        assert cell["stock_values"] == 14 and cell["stock_values_equal"] < 14
        assert cell["stock_different"] > 1000


def test_one_rank_of_the_stock_block_is_itself():
    (cell,) = measure(("tp1",), ("bfloat16",), (7,), (0,))["cells"]
    assert cell["stock_values_equal"] == cell["stock_values"] and cell["stock_different"] == 0


def test_the_committed_matrix_has_every_cell_once():
    content = json.loads((ROOT / "reports" / "cpu" / "gate-matrix.json").read_text())
    cells = [(c["layout"], c["dtype"], c["rows"], c["seed"]) for c in content["cells"]]
    assert content["complete"]
    assert sorted(cells) == sorted(itertools.product(LAYOUTS, DTYPES, ROWS, SEEDS))
