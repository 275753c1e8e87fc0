"""One launch of a kernel: ready to be started, or to be compiled and read.

Triton finds the compiled form of a kernel by specialising every argument at every launch. Here the
form is kept under what it depends on: the kernel, its constants, dtype and alignment of each
pointer, the box of each descriptor, whether an integer fits 32 bits and, where the kernel lets
Triton specialise it, its value. So a launch after the first costs one look-up and the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h3lib.ops.hopper.compat import TMA_ALIGNMENT_BYTES, TensorDescriptor, map_on

INT32_MAX = 2**31 - 1
MOST_KEPT = 4096
_NOTHING = object()


class Launch(NamedTuple):
    """A kernel, its operands in the order of its parameters, and its fixed options."""

    kernel: object
    operands: tuple
    options: dict
    grid: tuple[int, ...]

    def start(self) -> object | None:
        """Launch on the current device and stream; the compiled form, None if interpreted."""
        values = _by_value(self.kernel)
        if values is None:
            self.kernel[self.grid](*self.operands, **self.options)
            return None
        form = (
            self.kernel,
            torch.cuda.current_device(),
            *self.options.values(),
            *map(_form, self.operands, values),
        )
        compiled = _COMPILED.get(form)
        if compiled is None:
            compiled = _COMPILED[form] = self.kernel[self.grid](*self.operands, **self.options)
        else:
            compiled[(*self.grid, 1, 1)](*self.operands)
        return compiled


class Again:
    """A launch that is started again and again with other tensors of the same signature.

    What follows the tensors stays, the tensors do not; the form is looked up at the first start.
    """

    def __init__(self, launch: Launch, num_tensors: int):
        self.rest = launch.operands[num_tensors:]
        self.launch, self.run = launch._replace(operands=()), None

    def operands_on(self, tensors: tuple[Tensor, ...]) -> tuple[object, ...]:
        return (*tensors, *self.rest)

    def start(self, *tensors: Tensor) -> None:
        operands = self.operands_on(tensors)
        if self.run is not None:
            self.run(*operands)
        elif compiled := self.launch._replace(operands=operands).start():
            self.run = compiled[(*self.launch.grid, 1, 1)]


class AgainByViews(Again):
    """The same for a launch whose descriptors read the tensors.

    `tensors` are those of the launch, each an object of its own (`kept_by_signature` sees to it).
    """

    def __init__(self, launch: Launch, tensors: Sequence[Tensor]):
        super().__init__(launch, 0)
        places = {id(x): i for i, x in enumerate(tensors)}
        none = torch.empty(0, device="meta")
        self.rest, self.slots = list(self.rest), []
        for at, operand in enumerate(self.rest):
            if isinstance(operand, TensorDescriptor):
                self.slots.append((at, places[id(operand.base)], map_on(operand, none)))
            elif isinstance(operand, Tensor):
                self.slots.append((at, places[id(operand)], None))
        for at, _, _ in self.slots:
            self.rest[at] = None

    def operands_on(self, tensors: tuple[Tensor, ...]) -> tuple[object, ...]:
        operands = self.rest.copy()
        for at, i, view in self.slots:
            operands[at] = tensors[i] if view is None else map_on(view, tensors[i])
        return tuple(operands)


def kept_by_signature(make: Callable) -> Callable:
    """`make(*operands)`, made once for each dtype, device, shape, strides and alignment of the
    tensors and each value of the rest: what may be launched and how depends on nothing else.

    `make` sees each tensor as an object of its own, also where one was given twice.
    """
    kept: dict[tuple[object, ...], object] = {}

    @functools.wraps(make)
    def find(*operands: object) -> object:
        on_gpu = isinstance(operands[0], Tensor) and operands[0].is_cuda
        device = torch.cuda.current_device() if on_gpu else None
        key = (device, *map(_signature, operands))
        found = kept.get(key, _NOTHING)
        if found is _NOTHING:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            own = (x.detach() if isinstance(x, Tensor) else x for x in operands)
            found = kept[key] = make(*own)
        return found

    return find


def _signature(x: object) -> object:
    if not isinstance(x, Tensor):
        return x
    aligned = x.device.type != "cuda" or x.data_ptr() % TMA_ALIGNMENT_BYTES == 0
    return x.dtype, x.device, x.shape, x.stride(), aligned


_COMPILED: dict[tuple[object, ...], object] = {}


@functools.cache
def _by_value(kernel: object) -> tuple[bool, ...] | None:
    """For each parameter, whether the compiled form may depend on an integer's value."""
    parameters = getattr(kernel, "params", None)
    if parameters is None:
        return None
    return tuple(p.is_constexpr or not p.do_not_specialize for p in parameters)


def _form(operand: object, by_value: bool) -> object:
    """What the compiled form depends on."""
    if isinstance(operand, Tensor):
        return operand.dtype, operand.data_ptr() % TMA_ALIGNMENT_BYTES == 0
    if isinstance(operand, TensorDescriptor):
        # Layouts are made once and kept (`compat.py`), so the identity of one stands for it.
        return operand.base.dtype, tuple(operand.block_shape), id(operand.layout)
    if isinstance(operand, int) and not by_value:
        return operand <= INT32_MAX
    return operand if by_value else type(operand)
