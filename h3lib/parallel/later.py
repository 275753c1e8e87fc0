"""The result of a collective that may still run.

    later = level.later(lambda: collective.all_reduce(...))    launched, beside what follows
    ...                                                        products that do not need it
    later.value()                                              the result, or what it raises
"""

from __future__ import annotations

from torch import Tensor


class Later:
    """A result that is there already, as of a level that runs nothing beside anything else."""

    def __init__(self, result: Tensor):
        self._result = result

    def join(self) -> None:
        """What is launched from now on comes after the collective."""

    def value(self) -> Tensor:
        """The result, joined. **Raises:** PeerError as the collective, if it did not raise yet."""
        self.join()
        return self._result
