"""Logical rows: any storage order, any padding, the same rows; unorderable keys raise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_same_bytes, generator, normal

from h3lib.contract import RowsError
from h3lib.rows import LogicalRows

PADDING = [-1, 0]


def keys(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)


@given(st.data(), st.integers(1, 30), st.integers(0, 6), st.sampled_from([2, 3]))
def test_any_storage_order_and_padding_gives_rows_in_ascending_key_order(data, n, pad, columns):
    column = st.integers(-5, 5) if columns == 3 else st.integers(-50, 50)
    rest = st.tuples(*[column] * (columns - 1))
    active = data.draw(st.lists(rest, min_size=n, max_size=n, unique=True))
    document = data.draw(st.integers(0, 3))
    rows = [(document, *row) for row in active] + [(-1, *[0] * (columns - 1))] * pad
    order = data.draw(st.permutations(range(len(rows))))
    stored = [rows[i] for i in order]
    found = LogicalRows.of(torch.tensor(stored))
    assert (found.num_packed, found.num_rows) == (n + pad, n)
    values = normal(n, n + pad, 3)
    expected = [stored.index(row) for row in sorted(row for row in stored if row[0] >= 0)]
    gathered = found.gather(values)
    assert_same_bytes(gathered, values[expected])
    back = found.scatter(gathered)
    kept = torch.tensor([row[0] >= 0 for row in stored])
    assert_same_bytes(back[kept], values[kept])
    assert_same_bytes(back[~kept], torch.zeros(pad, 3, dtype=values.dtype))  # +0, not -0


@pytest.mark.parametrize("tail", [0, 3])
def test_rows_already_in_order_are_used_in_place(tail):
    rows = LogicalRows.of(keys([0, 2], [0, 5], [0, 9], *[PADDING] * tail))
    packed = normal(0, 3 + tail, 4)
    assert rows.order is None
    assert rows.gather(packed).data_ptr() == packed.data_ptr()
    assert_same_bytes(rows.gather(packed), packed[:3])


def test_rows_already_in_order_without_padding_are_not_copied_back():
    rows = LogicalRows.of(keys([0, 0], [0, 1]))
    logical = normal(0, 2, 4)
    assert rows.scatter(logical).data_ptr() == logical.data_ptr()


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 2, 1]])
def test_rows_out_of_order_are_gathered(order):
    rows = LogicalRows.of(keys([0, 0], [0, 1], [0, 2])[order])
    packed = normal(1, 3, 4)
    assert rows.order is not None
    assert_same_bytes(rows.gather(packed), packed[torch.tensor(order).argsort()])


def test_padding_at_the_head_and_in_the_middle_is_skipped_even_if_it_is_nan():
    stored = keys(PADDING, [0, 0], PADDING, [0, 1], PADDING)
    packed = torch.full((5, 2), float("nan"))
    packed[[1, 3]] = torch.tensor([[1.0, 2.0], [3.0, -0.0]])
    rows = LogicalRows.of(stored)
    assert_same_bytes(rows.gather(packed), torch.tensor([[1.0, 2.0], [3.0, -0.0]]))
    expected = torch.tensor([[0.0, 0], [1, 2], [0, 0], [3, -0.0], [0, 0]])
    assert_same_bytes(rows.scatter(rows.gather(packed)), expected)


def test_padding_needs_no_unique_keys_and_any_negative_document_is_padding():
    rows = LogicalRows.of(keys([-1, 7], [-1, 7], [-9, 3], [0, 3]))
    assert (rows.num_rows, rows.order.tolist()) == (1, [3])


def test_three_columns_are_compared_document_then_major_then_minor():
    stored = keys([0, 1, 0], [0, 0, 9], [0, 0, -4], [0, 1, -1])
    assert LogicalRows.of(stored).order.tolist() == [2, 1, 3, 0]


def test_keys_far_apart_are_ordered_exactly():
    low, high = -(2**63), 2**63 - 1
    stored = keys([0, high], [0, 2**53 + 1], [0, 2**53], [0, low])
    assert LogicalRows.of(stored).order.tolist() == [3, 2, 1, 0]


def test_integers_and_floats_of_any_shape_are_gathered_alike():
    g = generator(0)
    rows = LogicalRows.of(keys([0, 1], PADDING, [0, 0]))
    for packed in (torch.arange(3), torch.randn(3, 2, 5, generator=g, dtype=torch.float64)):
        assert_same_bytes(rows.gather(packed), packed[[2, 0]])
        assert rows.scatter(rows.gather(packed)).dtype == packed.dtype


@pytest.mark.parametrize("stored", [keys(PADDING, PADDING), torch.zeros(0, 2, dtype=torch.int64)])
def test_no_active_row_is_refused(stored):
    with pytest.raises(RowsError, match="active rows: received 0; accepted: at least 1"):
        LogicalRows.of(stored)


def test_two_documents_are_refused():
    with pytest.raises(RowsError, match=r"documents: received \[0, 3\]; accepted: one document"):
        LogicalRows.of(keys([3, 0], [0, 0], PADDING))


@pytest.mark.parametrize(
    "stored,twin",
    [
        (keys([0, 4], [0, 1], [0, 4]), r"\(0, 4\)"),
        (keys([0, 4, 1], [0, 4, 2], [0, 4, 1]), r"\(0, 4, 1\)"),
    ],
)
def test_duplicate_keys_are_refused_naming_the_key(stored, twin):
    with pytest.raises(RowsError, match=f"two active rows: received {twin}; accepted: unique"):
        LogicalRows.of(stored)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64, torch.bool])
def test_keys_of_another_dtype_are_refused(dtype):
    with pytest.raises(RowsError, match=f"received {dtype}; accepted: torch.int64"):
        LogicalRows.of(torch.zeros(1, 2, dtype=dtype))


def test_keys_that_are_no_tensor_are_refused():
    with pytest.raises(RowsError, match="received 'list'; accepted: torch.int64"):
        LogicalRows.of([[0, 0]])


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 4), (1, 4, 2)])
def test_keys_of_another_shape_are_refused(shape):
    with pytest.raises(RowsError, match=r"accepted: \[T, 2\] or \[T, 3\]") as caught:
        LogicalRows.of(torch.zeros(shape, dtype=torch.int64))
    assert caught.value.received == shape


def test_tensors_with_another_number_of_rows_are_refused():
    rows = LogicalRows.of(keys([0, 0], [0, 1], PADDING))
    with pytest.raises(RowsError, match="number of packed rows: received 2; accepted: 3"):
        rows.gather(torch.zeros(2, 1))
    with pytest.raises(RowsError, match="number of logical rows: received 3; accepted: 2"):
        rows.scatter(torch.zeros(3, 1))
