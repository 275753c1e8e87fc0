"""Parameter names and counts; synthetic values: golden numbers, slices equal to the whole."""

import hashlib
import math
import weakref
from dataclasses import replace

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st

from h3lib.contract import SIZES, CheckpointError, Contract, ModelSize, OperandError
from h3lib.layout import Layout, Ownership, region_shape
from h3lib.model import weights
from h3lib.model.released import config
from h3lib.model.weights import (
    Parameter,
    SyntheticWeights,
    digest,
    digests,
    parameter_values,
    parameters,
    synthetic_rows,
    uniform,
)
from h3lib.parallel.shard import ROW, parameter_region, placement

TINY, FULL = SIZES["tiny"], SIZES["full"]
GOLDEN = ModelSize("golden", 24, 2, 16, 32, 16, 24, 8, 2, 8, 2, in_channels=4, audio_in_channels=6)
BLOCK = "transformer_blocks.1."


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and digest(a) == digest(b)


def scalar_uniform(key: int, index: int) -> float:
    """The generator once more, in Python's integers."""
    mask = 2**32 - 1
    x = ((index + 1) * 2654435761 + (key + 1) * 40503) & mask
    x ^= x >> 16
    x = x * 2246822519 & mask
    x ^= x >> 13
    x = x * 3266489917 & mask
    x ^= x >> 16
    return 2 * (x / 2**32) - 1


def test_uniform_golden_values():
    first = torch.arange(4)
    expected = {
        0: [0.135875, 0.595826, -0.086181, -0.986653],
        61: [-0.679123, 0.606014, -0.569971, 0.167502],
    }
    for key, values in expected.items():
        assert uniform(key, first).dtype == torch.float64
        assert uniform(key, first).tolist() == pytest.approx(values, abs=5e-7)


@given(key=st.integers(0, 2**32 - 1), index=st.integers(0, 2**40))
def test_uniform_is_exact_for_every_key_and_index(key, index):
    assert uniform(key, torch.tensor([index])).item() == scalar_uniform(key, index)


def test_uniform_at_the_edges_of_32_bits():
    index = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32])
    for key in (0, 2**31, 2**32 - 1):
        assert uniform(key, index).tolist() == [scalar_uniform(key, int(j)) for j in index]


def test_uniform_keeps_its_index():
    index = torch.arange(8)
    uniform(3, index)
    assert torch.equal(index, torch.arange(8))


def test_uniform_looks_uniform():
    values = uniform(weights.stream_key("parameter", 0, "x"), torch.arange(1 << 16))
    assert abs(values.mean()) < 5 / math.sqrt(3 * (1 << 16))  # five standard errors
    assert abs(values.square().mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / (1 << 16))


def test_golden_parameters_by_sorted_name():
    table = parameters(GOLDEN)
    names = sorted(table)
    anchors = {
        0: "audio_proj_in.bias",
        7: "norm_out.linear.weight",
        16: "time_embedder.linear_2.weight",
        17: "token_refiner.final_norm.weight",
        18: "token_refiner.refiner_blocks.0.attn.norm_k.weight",
        38: "transformer_blocks.0.adaln_proj.linear.bias",
        46: "transformer_blocks.0.ff.net.0.proj.weight",
        61: "transformer_blocks.1.norm2.weight",
    }
    assert len(names) == 62 and all(names[k] == name for k, name in anchors.items())
    recipe = {
        0: lambda u, shape: 0.5 * u,
        7: lambda u, shape: 2 * u * math.sqrt(3 / shape[1]),
        61: lambda u, shape: 1 + 0.5 * u,
    }
    for key, value in recipe.items():
        shape = table[names[key]].shape
        received = parameter_values(names[key], Parameter(shape, torch.float32), key)
        flat = [value(scalar_uniform(key, j), shape) for j in range(math.prod(shape))]
        expected = torch.tensor(flat, dtype=torch.float64).to(torch.float32).reshape(shape)
        assert same_bytes(received, expected)


@pytest.mark.parametrize("size", [TINY, FULL, GOLDEN], ids=lambda size: size.name)
def test_parameters_are_those_of_diffusers(size):
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**config(size, "diffusers"))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: parameter.shape for name, parameter in parameters(size).items()} == expected


def test_counts_of_the_released_model():
    table = parameters(FULL)
    assert len(table) == 638
    num_elements = {name: math.prod(parameter.shape) for name, parameter in table.items()}

    def total(*parts: str) -> int:
        return sum(n for name, n in num_elements.items() if all(part in name for part in parts))

    assert total("transformer_blocks.0.") == 645_571_840
    assert total("transformer_blocks.0.", ".attn.") == 154_140_928
    assert total("transformer_blocks.0.", ".ff.") == 231_211_008
    assert total("transformer_blocks.0.", ".adaln_proj.") == 260_209_152
    assert total("refiner_blocks.1.") == 385_362_688
    fp32 = {name.rsplit(".", 1)[0] for name, p in table.items() if p.dtype == torch.float32}
    assert fp32 == {
        "proj_in", "audio_proj_in", "time_embedder.linear_1", "time_embedder.linear_2",
        "proj_out", "audio_proj_out",
    }  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_slices_of_every_placement_make_up_the_whole(tp):
    owner, source = Ownership.of(Layout(tp), 264, Contract()), SyntheticWeights(TINY, seed=5)
    names = [name for name in source.names if name.startswith((BLOCK, "time_embedder."))]
    assert len(names) == 16
    for name in names:
        whole = source.read(name)
        regions = [parameter_region(name, source.shape(name), owner, rank) for rank in range(tp)]
        slices = [source.read(name, region) for region in regions]
        placed = torch.zeros_like(whole)
        for region, part in zip(regions, slices, strict=True):
            rows = torch.cat([torch.arange(r.start, r.stop) for r in region[0]])
            if placement(name) == ROW:
                placed[:, region[1][0].start : region[1][0].stop] = part
            else:
                placed[rows] = part
            assert part.is_contiguous() and tuple(part.shape) == region_shape(region)
        assert same_bytes(placed, whole), name


@st.composite
def regions(draw, shape):
    """Up to three ranges a dim, in any order, some empty."""
    region = []
    for size in shape:
        edges = draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), min_size=1,
                              max_size=3))  # fmt: skip
        region.append(tuple(range(min(pair), max(pair)) for pair in edges))
    return tuple(region)


def part_of(whole: torch.Tensor, region) -> torch.Tensor:
    """The region of a tensor, by index lists."""
    for dim, ranges in enumerate(region):
        index = [i for part in ranges for i in part]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return whole


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_slice_is_the_same_part_of_the_whole(data):
    source = SyntheticWeights(TINY, seed=data.draw(st.integers(0, 3)))
    name = data.draw(st.sampled_from(source.names))
    region = data.draw(regions(source.shape(name)))
    assert same_bytes(source.read(name, region), part_of(source.read(name), region))


def test_values_do_not_depend_on_the_chunk(monkeypatch):
    source, name = SyntheticWeights(TINY), "transformer_blocks.0.attn.to_q.weight"
    whole = source.read(name)
    made = []
    monkeypatch.setattr(weights, "_CHUNK", {"cpu": 200})
    monkeypatch.setattr(weights, "uniform", lambda k, j: made.append(j.numel()) or uniform(k, j))
    assert same_bytes(source.read(name), whole)
    assert max(made) <= 200 and sum(made) == whole.numel()


def test_values_are_keyed_by_seed_and_name():
    first, second = SyntheticWeights(TINY, seed=0), SyntheticWeights(TINY, seed=1)
    blocks = ("transformer_blocks.0", "transformer_blocks.1")
    names = [f"{block}.attn.to_{part}.weight" for block in blocks for part in "qkv"]
    digests = {digest(source.read(name)) for source in (first, second) for name in names}
    assert len(digests) == 12
    assert same_bytes(first.read(names[0]), SyntheticWeights(TINY).read(names[0]))


def test_a_seed_gives_the_same_bytes_everywhere():
    """A pinned value, so that ranks and hosts cannot disagree about the key of a name."""
    assert weights.stream_key("parameter", 0, "proj_in.weight") == int(
        hashlib.sha256(b"parameter\x000\x00proj_in.weight").hexdigest()[:8], 16
    )


def test_matrices_keep_unit_variance():
    """2 U sqrt(3 / in) has variance 4 / in: products of unit rows have variance 4."""
    weight = SyntheticWeights(TINY).read("transformer_blocks.0.ff.net.0.proj.weight").double()
    assert weight.var().item() == pytest.approx(4 / 96, rel=0.05)


def test_rows_do_not_depend_on_their_company():
    rows = torch.arange(40)
    whole = synthetic_rows("video", 3, rows, 24, torch.bfloat16)
    order = torch.tensor([39, 0, 7, 7, 21])
    assert same_bytes(synthetic_rows("video", 3, order, 24, torch.bfloat16), whole[order])
    assert synthetic_rows("video", 3, rows[:0], 24, torch.bfloat16).shape == (0, 24)


def test_rows_are_keyed_by_label_and_seed_and_scaled():
    rows = torch.arange(100, 108)
    key = weights.stream_key("rows", 3, "video")
    flat = [1.7 * scalar_uniform(key, j) for j in range(24 * 100, 24 * 108)]
    expected = torch.tensor(flat, dtype=torch.float64).to(torch.float32).reshape(8, 24)
    received = synthetic_rows("video", 3, rows, 24, torch.float32)
    assert same_bytes(received, expected)
    others = [("audio", 3, 1.7), ("video", 4, 1.7), ("video", 3, 1.0)]
    for label, seed, scale in others:
        other = synthetic_rows(label, seed, rows, 24, torch.float32, scale)
        assert not torch.equal(other, received)


@pytest.mark.parametrize(
    "region",
    [
        (),
        ((range(2),),),
        ((range(2),), ()),
        ((range(2),), (range(97),)),
        ((range(0, 4, 2),), (range(2),)),
        ((range(-1, 2),), (range(2),)),
    ],
)
def test_regions_outside_a_parameter_are_refused(region):
    with pytest.raises(OperandError) as error:
        SyntheticWeights(TINY).read("transformer_blocks.0.attn.to_q.weight", region)
    assert "to_q.weight" in str(error.value)


def test_unknown_names_are_refused():
    source = SyntheticWeights(TINY)
    for call in (source.read, source.shape, source.dtype):
        with pytest.raises(CheckpointError) as error:
            call("transformer_blocks.2.norm1.weight")
        assert error.value.received == "transformer_blocks.2.norm1.weight"


def test_digest_is_that_of_the_bytes():
    tensor = torch.tensor([[1.0, -0.0], [2.5, 3.0]], dtype=torch.float32)
    assert digest(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert digest(tensor.T) == hashlib.sha256(tensor.numpy().T.copy().tobytes()).hexdigest()
    assert digest(tensor) != digest(tensor.abs())  # -0.0 is not 0.0
    assert digest(torch.empty(0, 4)) == hashlib.sha256(b"").hexdigest()


def test_parameters_follow_the_number_of_layers():
    assert len(parameters(replace(TINY, num_layers=3))) == len(parameters(TINY)) + 12


def test_digests_are_those_of_each_tensor_and_few_are_held():
    alive = weakref.WeakSet()
    most = 0

    def named():
        nonlocal most
        for i in range(40):
            tensor = torch.full((1000,), i)
            alive.add(tensor)
            most = max(most, len(alive))
            yield str(i), tensor
            del tensor

    found = digests(named())
    assert found == {str(i): digest(torch.full((1000,), i)) for i in range(40)}
    assert most <= 10  # eight, the one that is made, and the one just handed over
