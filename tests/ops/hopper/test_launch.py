"""A launch reuses a compiled form exactly where Triton itself would have made the same one."""

import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is pinned in the GPU requirements")

from h3lib.ops.hopper import (
    attention_dkv,
    attention_dq,
    attention_forward,
    attention_statistics,
    launch,
)
from h3lib.ops.hopper.compat import TensorDescriptor, tensor_map
from h3lib.ops.hopper.launch import Again, AgainByViews, Launch, kept_by_signature


class Kernel:
    """Parameters: a pointer, an integer that is not specialised, one that is, a constant."""

    def __init__(self):
        kinds = ((False, False), (False, True), (False, False), (True, False))
        self.params = [
            SimpleNamespace(is_constexpr=constant, do_not_specialize=free)
            for constant, free in kinds
        ]
        self.compiled, self.reused = [], []

    def __getitem__(self, grid):
        def compile_and_run(*operands, **options):
            self.compiled.append((grid, operands, options))
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *operands: self.kernel.reused.append((grid, operands))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_COMPILED", {})
    return Kernel()


X = torch.zeros(64, dtype=torch.bfloat16)
START = (X[:32], 7, 16, "constant")
SAME = {
    "another pointer, aligned alike": (X[8:40], 7, 16, "constant"),
    "an integer that is not specialised": (X[:32], 9, 16, "constant"),
}
OTHER = {
    "dtype": (X[:32].float(), 7, 16, "constant"),
    "alignment": (X[1:33], 7, 16, "constant"),
    "an integer beyond 32 bits": (X[:32], 2**31, 16, "constant"),
    "a specialised integer": (X[:32], 7, 17, "constant"),
    "a constant": (X[:32], 7, 16, "other"),
    "no pointer": (None, 7, 16, "constant"),
}


@pytest.mark.parametrize("name", SAME)
def test_the_compiled_form_is_kept(kernel, name):
    Launch(kernel, START, {"num_warps": 4}, (3,)).start()
    Launch(kernel, SAME[name], {"num_warps": 4}, (5, 2)).start()
    assert len(kernel.compiled) == 1
    ((grid, operands),) = kernel.reused
    assert grid[:3] == (5, 2, 1) and all(a is b for a, b in zip(operands, SAME[name], strict=True))


@pytest.mark.parametrize("name", OTHER)
def test_what_the_form_depends_on_compiles_anew(kernel, name):
    Launch(kernel, START, {"num_warps": 4}, (3,)).start()
    Launch(kernel, OTHER[name], {"num_warps": 4}, (3,)).start()
    assert len(kernel.compiled) == 2 and not kernel.reused


def test_options_and_the_device_are_part_of_the_form(kernel, monkeypatch):
    Launch(kernel, START, {"num_warps": 4}, (3,)).start()
    Launch(kernel, START, {"num_warps": 8}, (3,)).start()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    Launch(kernel, START, {"num_warps": 8}, (3,)).start()
    assert len(kernel.compiled) == 3


def test_descriptors_are_told_apart_by_their_boxes():
    x = torch.empty(128, 64, dtype=torch.bfloat16, device="meta")

    def form(rows):
        return launch._form(tensor_map("x", x, x.shape, x.stride(), (rows, 64)), True)

    assert form(64) == form(64) != form(128)


def test_a_launch_started_again_is_looked_up_once_and_keeps_no_tensor(kernel):
    first = torch.zeros(32, dtype=torch.bfloat16)
    alive = weakref.ref(first)
    again = Again(Launch(kernel, (first, 7, 16, "constant"), {}, (3,)), 1)
    again.start(first)
    del first
    kernel.compiled[0] = None
    assert alive() is None
    again.start(X[:32])
    again.start(X[8:40])
    assert len(kernel.compiled) == 1
    pointers = X.data_ptr(), X[8:].data_ptr()
    for (grid, (x, *rest)), pointer in zip(kernel.reused, pointers, strict=True):
        assert (grid, rest, x.data_ptr()) == ((3, 1, 1), [7, 16, "constant"], pointer)


def test_what_is_kept_by_signature_is_made_again_for_another_one():
    made = []

    @kept_by_signature
    def make(x, value):
        made.append((x.dtype, x.shape, value))
        return len(made)

    assert [make(X[:32], 1), make(X[8:40], 1), make(torch.zeros_like(X)[:32], 1)] == [1, 1, 1]
    others = (X[:16], 1), (X[:32], 2), (X[:32].float(), 1), (X[::2], 1), (X[:32].view(4, 8), 1)
    assert [make(*other) for other in others] == [2, 3, 4, 5, 6]
    assert make(X[:32], 1) == 1


def attention(kind):
    """A launch on new tensors, and those tensors; q and k are of one shape."""
    new = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    q, k, v, dout, like, also = (new(70, 3, 128) for _ in range(6))
    lse, delta, by_head = (torch.zeros(s) for s in ((70, 3), (70, 3), (2, 3, 128)))
    tensors = {
        "forward": (q, k, v, like, lse),
        "dq": (q, k, v, dout, lse, delta, like),
        "dkv": (q, k, v, dout, by_head, like, also),
        "by head": (lse, delta, by_head),
    }[kind]
    make = {
        "forward": lambda *x: attention_forward.forward_launch(*x, 132, 2),
        "dq": lambda *x: attention_dq.dq_launch(*x, 132),
        "dkv": lambda *x: attention_dkv.dkv_launch(*x, 132),
        "by head": attention_statistics.by_head_launch,
    }[kind]
    return make(*tensors), tensors


@pytest.mark.parametrize("kind", ["forward", "dq", "dkv", "by head"])
def test_descriptors_of_a_kept_launch_read_the_other_tensors(kind):
    kept = AgainByViews(*attention(kind))
    assert not any(isinstance(x, torch.Tensor | TensorDescriptor) for x in kept.rest)
    fresh, tensors = attention(kind)
    for one, other in zip(kept.operands_on(tensors), fresh.operands, strict=True):
        assert type(one) is type(other)
        if isinstance(one, TensorDescriptor):
            assert one.base is other.base
            for name in ("shape", "strides", "block_shape", "layout"):
                assert getattr(one, name) == getattr(other, name)
        else:
            assert one is other if isinstance(one, torch.Tensor) else one == other


def test_a_tensor_given_twice_is_seen_as_two():
    seen = []
    kept_by_signature(lambda *tensors: seen.extend(tensors))(X, X)
    assert seen[0] is not seen[1] and seen[0].data_ptr() == X.data_ptr()
