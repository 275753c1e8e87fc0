"""Ops choose their back end by name: no default beside eager, no fallback; operands are checked."""

import importlib
import pkgutil

import pytest
import torch

import h3lib.ops
from h3lib.contract import BackendError, OperandError
from h3lib.ops.backend import FLOATS, Op, accumulator, check_operands, check_shape, op

MODULES = [m.name for m in pkgutil.iter_modules(h3lib.ops.__path__) if not m.ispkg]


def every_op() -> dict[str, Op]:
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"h3lib.ops.{name}")
        found |= {o.__name__: o for o in vars(module).values() if isinstance(o, Op)}
    return found


@op
def double(x: float) -> float:
    """2 x."""
    return 2 * x


def test_eager_is_the_definition_and_keeps_its_name_and_docstring():
    assert double(3.0) == double(3.0, backend="eager") == 6.0
    assert (double.__name__, double.__doc__) == ("double", "2 x.")


def test_a_registered_back_end_runs_only_when_it_is_named():
    @op
    def halve(x):
        return x / 2

    @halve.register("shift")
    def halve_shift(x, places=1):
        return x >> places

    assert halve(5) == 2.5
    assert halve(5, backend="shift") == 2
    assert halve(5, places=2, backend="shift") == 1
    assert halve_shift(5) == 2  # the decorator gives the function back


@pytest.mark.parametrize("backend", ["triton2", "", "Eager", None])
def test_unknown_back_end_is_refused_naming_those_of_the_op(backend):
    with pytest.raises(BackendError, match="back end of double: received .*; accepted: eager$"):
        double(1.0, backend=backend)


def test_every_op_refuses_an_unknown_back_end_before_it_looks_at_operands():
    ops = every_op()
    assert {"linear_forward", "attention_forward", "rms_norm_forward", "row_unit_roots"} <= set(ops)
    for name, function in ops.items():
        assert next(iter(function.implementations)) == "eager"
        assert function.__doc__
        with pytest.raises(BackendError, match=f"back end of {name}: received 'abacus'"):
            function(backend="abacus")


def test_accumulators_are_fp32_and_fp64_for_fp64():
    assert [accumulator(torch.zeros(1, dtype=d)) for d in FLOATS] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_are_refused_naming_the_operand(dtype):
    accepted = "torch.bfloat16, torch.float32, torch.float64"
    with pytest.raises(OperandError, match=f"dtype of x: received {dtype}; accepted: {accepted}"):
        check_operands(x=torch.zeros(1, dtype=dtype))


def test_operands_of_two_dtypes_or_devices_are_refused():
    x = torch.zeros(1)
    check_operands(x=x, y=x)
    with pytest.raises(OperandError, match="dtype of y: received torch.float64; .*float32 as x"):
        check_operands(x=x, y=x.double())
    with pytest.raises(OperandError, match="device of y: received 'meta'; accepted: cpu as x"):
        check_operands(x=x, y=x.to("meta"))


@pytest.mark.parametrize(
    "shape,accepted",
    [((2, 4), r"\(2, 4\)"), ((None, 4), r"\(any, 4\)"), ((2, 3, 1), ""), ((2,), ""), ((), "")],
)
def test_other_shapes_are_refused_naming_both(shape, accepted):
    with pytest.raises(OperandError, match=rf"shape of x: received \(2, 3\); accepted: {accepted}"):
        check_shape("x", torch.zeros(2, 3), *shape)


@pytest.mark.parametrize("shape", [(2, 3), (None, 3), (2, None), (None, None)])
def test_none_stands_for_any_size(shape):
    check_shape("x", torch.zeros(2, 3), *shape)
