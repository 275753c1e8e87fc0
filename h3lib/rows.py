"""Logical rows: the order of rows, their padding and their uniqueness, resolved before sharding.

A packed row has a logical key, `[T, 2]` (document, position) or `[T, 3]` (document, major, minor),
compared lexicographically; a negative document marks padding. Rows are reduced in ascending key
order whatever order they are stored in, so permuting rows with all their metadata changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h3lib.contract import RowsError


@dataclass(frozen=True)
class LogicalRows:
    """The active rows among `num_packed`, in logical order.

    `order` `[num_rows]` holds their packed indices; None if they are rows 0..num_rows-1 in place.
    """

    num_packed: int
    num_rows: int
    order: Tensor | None = None

    @classmethod
    def of(cls, logical_keys: Tensor) -> LogicalRows:
        """Sort the keys of one document.

        **Raises:** RowsError for a wrong shape or dtype, no active row, more than one document, or
        two active rows with one key.
        """
        _check_keys(logical_keys)
        active = (logical_keys[:, 0] >= 0).nonzero()[:, 0]
        if not len(active):
            raise RowsError("active rows", 0, "at least 1 key whose first column is not negative")
        keys = logical_keys[active]
        documents = keys[:, 0].unique()
        if len(documents) > 1:
            raise RowsError("documents", documents.tolist(), "one document")
        sorting = torch.arange(len(keys), device=keys.device)
        for column in reversed(range(keys.shape[1])):
            sorting = sorting[keys[sorting, column].argsort(stable=True)]
        keys = keys[sorting]
        twins = (keys[1:] == keys[:-1]).all(dim=1)
        if twins.any():
            twin = keys[1:][twins][0].tolist()
            raise RowsError("logical key of two active rows", tuple(twin), "unique keys")
        order = active[sorting]
        in_place = torch.equal(order, torch.arange(len(order), device=order.device))
        return cls(len(logical_keys), len(order), None if in_place else order)

    def gather(self, packed: Tensor) -> Tensor:
        """The active rows of `[num_packed, ...]`, in logical order, `[num_rows, ...]`."""
        if len(packed) != self.num_packed:
            raise RowsError("number of packed rows", len(packed), self.num_packed)
        return packed[: self.num_rows] if self.order is None else packed[self.order]

    def scatter(self, logical: Tensor) -> Tensor:
        """Logical rows back to where they are packed; a padded row is +0."""
        if len(logical) != self.num_rows:
            raise RowsError("number of logical rows", len(logical), self.num_rows)
        if self.order is None and self.num_rows == self.num_packed:
            return logical
        packed = logical.new_zeros((self.num_packed, *logical.shape[1:]))
        if self.order is None:
            packed[: self.num_rows] = logical
        else:
            packed[self.order] = logical
        return packed


def _check_keys(keys: Tensor) -> None:
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64:
        raise RowsError(
            "dtype of logical keys", getattr(keys, "dtype", type(keys).__name__), "torch.int64"
        )
    if keys.ndim != 2 or keys.shape[1] not in (2, 3):
        raise RowsError("shape of logical keys", tuple(keys.shape), "[T, 2] or [T, 3]")
