"""Parameters by name, and synthetic values that any rank can make for its own slice.

Every synthetic value is a function of a key and of an index, never of a generator's state:

    x = (j + 1) * 2654435761 + (k + 1) * 40503
    x ^= x >> 16;  x *= 2246822519;  x ^= x >> 13;  x *= 3266489917;  x ^= x >> 16
    U(k, j) = 2 * (x / 2^32) - 1                     (x is an unsigned 32-bit integer throughout)

    matrix 2 * U * sqrt(3 / in_features)     bias U / 2     norm weight 1 + U / 2     row s * U

so a slice is byte-equal to the same part of the whole, on any device. Names and shapes are those of
the diffusers checkpoint. Values repeat after 2^32 indices, which only tests and benchmarks may do.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from h3lib.contract import CheckpointError, ModelSize, OperandError
from h3lib.layout import Region, region_shape, whole

Value = TypeVar("Value")
_MASK = 0xFFFFFFFF
# The factors above minus 2^32: equal modulo 2^32, and int64 products cannot overflow.
_STEP, _MIX_1, _MIX_2 = (factor - 2**32 for factor in (2654435761, 2246822519, 3266489917))
# Values made at a time, on which they do not depend. On a CPU, temporaries of this size stay in
# cache and below the size at which PyTorch wakes threads; a GPU wants a launch that fills it.
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
_HASHED_AT_ONCE = 8


class Parameter(NamedTuple):
    """Global shape and stored dtype of one checkpoint tensor; a matrix is (out, in)."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def parameters(size: ModelSize) -> dict[str, Parameter]:
    """Every tensor of the diffusers checkpoint of `size`, in module order: 638 for `full`.

    The embedders, the time embedder and the output heads are FP32, everything else BF16.
    """
    hidden, rows = size.hidden_size, size.in_channels * math.prod(size.patch_size)
    table: dict[str, Parameter] = {}

    def linear(name: str, out_features: int, in_features: int, dtype=torch.bfloat16):
        table[f"{name}.weight"] = Parameter((out_features, in_features), dtype)
        table[f"{name}.bias"] = Parameter((out_features,), dtype)

    linear("proj_in", hidden, rows, torch.float32)
    linear("audio_proj_in", hidden, size.audio_in_channels, torch.float32)
    linear("context_embedder", hidden, size.text_dim)
    linear("time_embedder.linear_1", size.time_embed_hidden_dim, size.freq_dim, torch.float32)
    linear("time_embedder.linear_2", size.time_embed_dim, size.time_embed_hidden_dim, torch.float32)
    for layer in range(size.num_refiner_layers):
        table |= _block(size, f"token_refiner.refiner_blocks.{layer}")
    table["token_refiner.final_norm.weight"] = Parameter((hidden,), torch.bfloat16)
    for layer in range(size.num_layers):
        table |= _block(size, f"transformer_blocks.{layer}")
        linear(f"transformer_blocks.{layer}.adaln_proj.linear", size.adaln_dim, size.time_embed_dim)
    table["norm_out.norm.weight"] = Parameter((hidden,), torch.bfloat16)
    linear("norm_out.linear", 2 * hidden, size.time_embed_dim)
    linear("proj_out", rows, hidden, torch.float32)
    linear("audio_proj_out", size.audio_in_channels, hidden, torch.float32)
    return table


def _block(size: ModelSize, prefix: str) -> dict[str, Parameter]:
    """The ten tensors that a refiner block and a main block share."""
    hidden, inner, ffn = size.hidden_size, size.inner_dim, size.ffn_dim
    shapes = {
        "norm1": (hidden,),
        "attn.to_q": (inner, hidden),
        "attn.to_k": (inner, hidden),
        "attn.to_v": (inner, hidden),
        "attn.norm_q": (size.attention_head_dim,),
        "attn.norm_k": (size.attention_head_dim,),
        "attn.to_out.0": (hidden, inner),
        "norm2": (hidden,),
        "ff.net.0.proj": (2 * ffn, hidden),  # rows [value; gate]
        "ff.net.2": (hidden, ffn),
    }
    return {
        f"{prefix}.{name}.weight": Parameter(shape, torch.bfloat16)
        for name, shape in shapes.items()
    }


def under(prefix: str, named: Mapping[str, Value]) -> dict[str, Value]:
    """The entries whose names start with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in named.items()
        if name.startswith(prefix)
    }


def uniform(key: int, index: Tensor) -> Tensor:
    """U(key, index) in [-1, 1): float64 of the shape of `index` (int64, on any device).

    **Rounds:** never; every step is exact, so CPU and CUDA give the same bits.
    """
    x = (index & _MASK).add_(1).mul_(_STEP).add_((key + 1) * 40503 & _MASK).bitwise_and_(_MASK)
    x = x.bitwise_xor_(x >> 16).mul_(_MIX_1).bitwise_and_(_MASK)
    x = x.bitwise_xor_(x >> 13).mul_(_MIX_2).bitwise_and_(_MASK)
    x = x.bitwise_xor_(x >> 16)
    return x.to(torch.float64).mul_(2.0**-31).sub_(1.0)


def stream_key(*parts: object) -> int:
    """A 32-bit key for what `parts` name: the first four bytes of the SHA-256 of their text."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:4], "big")


def synthetic_rows(
    label: str, seed: int, rows: Tensor, width: int, dtype: torch.dtype, scale: float = 1.7
) -> Tensor:
    """[len(rows), width]: scale * U(key of (label, seed), row * width + column).

    `rows` int64 [n]: logical row numbers in any order, on any device. A row's values do not depend
    on which other rows are asked for.

    **Rounds:** float64 to FP32 to `dtype`.
    """
    out = torch.empty((len(rows), width), dtype=dtype, device=rows.device)
    columns = torch.arange(width, device=rows.device)
    _fill(out, stream_key("rows", seed, label), rows, columns, width, 0.0, scale)
    return out


def parameter_values(
    name: str,
    parameter: Parameter,
    key: int,
    region: Region | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The part `region` of a synthetic parameter: the recipe above with U(key, row * in + column).

    **Rounds:** float64 to FP32 to the parameter's dtype.
    **Raises:** OperandError if the region is not a part of the parameter.
    """
    shape, dtype = parameter
    parts = checked_region(name, shape, region)
    rows, columns = (_numbers(ranges, device) for ranges in ((range(1),), *parts)[-2:])
    out = torch.empty((len(rows), len(columns)), dtype=dtype, device=device)
    if len(shape) == 2:
        offset, scale = 0.0, 2.0 * math.sqrt(3.0 / shape[1])
    else:
        offset, scale = (0.0, 0.5) if name.endswith(".bias") else (1.0, 0.5)
    _fill(out, key, rows, columns, shape[-1], offset, scale)
    return out.reshape(region_shape(parts))


def _numbers(ranges: Iterable[range], device: torch.device | str) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in ranges])


def _fill(
    out: Tensor, key: int, rows: Tensor, columns: Tensor, width: int, offset: float, scale: float
) -> None:
    """out[i, j] = offset + scale * U(key, rows[i] * width + columns[j]), some rows at a time."""
    step = max(1, _CHUNK[out.device.type] // max(1, len(columns)))
    for start in range(0, len(rows), step):
        index = rows[start : start + step, None] * width + columns
        values = uniform(key, index).mul_(scale).add_(offset)
        out[start : start + step] = values.to(torch.float32)


def checked_region(name: str, shape: tuple[int, ...], region: Region | None) -> Region:
    """`region`, or the whole of `shape` when None.

    **Raises:** OperandError if it is not made of contiguous ranges inside `shape`.
    """
    if region is None:
        return whole(shape)
    inside = len(region) == len(shape) and all(
        ranges and all(part.step == 1 and 0 <= part.start <= part.stop <= size for part in ranges)
        for ranges, size in zip(region, shape, strict=True)
    )
    if not inside:
        raise OperandError(f"region of {name}", region, f"for each dim ranges inside {shape}")
    return region


class WeightSource(ABC):
    """Where parameters come from, a slice at a time; `names` are the parameters it holds."""

    def __init__(self, size: ModelSize, names: Iterable[str] | None = None):
        self.size = size
        self._parameters = parameters(size)
        self.names = tuple(self._parameters if names is None else names)
        for name in self.names:
            if name not in self._parameters:
                raise CheckpointError("parameter name", name, f"a parameter of {size.name}")

    def parameter(self, name: str) -> Parameter:
        """Global shape and dtype. **Raises:** CheckpointError for a name it does not hold."""
        if name not in self.names:
            raise CheckpointError("parameter name", name, "one of the names of this source")
        return self._parameters[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of the parameter `name`."""
        return self.parameter(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of the parameter `name`."""
        return self.parameter(name).dtype

    @abstractmethod
    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The part `region` of the parameter `name`, contiguous; the whole when None."""


class SyntheticWeights(WeightSource):
    """Synthetic values of every parameter of `size`, keyed by (seed, name, row, column)."""

    def __init__(self, size: ModelSize, seed: int = 0, device: torch.device | str = "cpu"):
        super().__init__(size)
        self.seed, self.device = seed, torch.device(device)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The part `region` of the parameter `name`; peak memory is that part and a small chunk."""
        key = stream_key("parameter", self.seed, name)
        return parameter_values(name, self.parameter(name), key, region, self.device)


def digest(tensor: Tensor) -> str:
    """SHA-256, in hex, of a tensor's bytes in row-major order, without its dtype and shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The `digest` of each tensor by name; eight are hashed at once, and no more are held."""
    hashed: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        for name, tensor in named:
            hashed[name] = pool.submit(digest, tensor)
            wait(list(hashed.values())[: 1 - _HASHED_AT_ONCE])
    return {name: future.result() for name, future in hashed.items()}
