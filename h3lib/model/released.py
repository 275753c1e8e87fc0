"""The two released key layouts: which stored rows hold the rows of a parameter.

    diffusers   every parameter under its own name
    original    other names, and no transposes:
                qkv_proj  rows head0 [q, k, v], head1 [q, k, v], ...: to_q, to_k, to_v by head
                mlp.fc1   rows [gate; value], where ff.net.0.proj has [value; gate]
                rope.inv_freq  FP32, recomputed elsewhere and never read

Reading qkv_proj as three contiguous thirds, or fc1 without the swap, gives right shapes and wrong
values. Sources: the MiniMax-H3 repository's index files; huggingface/diffusers
`scripts/convert_minimax_h3_to_diffusers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from h3lib.contract import NUM_MODALITIES, NUM_MODULATIONS, CheckpointError, ModelSize
from h3lib.model.weights import Parameter, parameters

DIFFUSERS, ORIGINAL = "diffusers", "original"
FILE_STEM = {DIFFUSERS: "diffusion_pytorch_model", ORIGINAL: "model"}
ROPE_KEY = "rope.inv_freq"

_QKV = re.compile(r"(.*\.attn)\.to_([qkv])\.weight")
_GATED = re.compile(r"(.*)\.ff\.net\.0\.proj\.weight")
_RENAMED = (
    # diffusers, original
    (r"^proj_in\.", "video_patch_proj."),
    (r"^audio_proj_in\.", "audio_patch_proj."),
    (r"^context_embedder\.", "condition_proj."),
    (r"^time_embedder\.linear_1\.", "time_embedder.proj_in."),
    (r"^time_embedder\.linear_2\.", "time_embedder.proj_out."),
    (r"^token_refiner\.refiner_blocks\.", "token_refiner.blocks."),
    (r"^transformer_blocks\.", "blocks."),
    (r"\.attn\.to_[qkv]\.", ".attn.qkv_proj."),
    (r"\.attn\.norm_([qk])\.", r".attn.\1_norm."),
    (r"\.attn\.to_out\.0\.", ".attn.out_proj."),
    (r"\.ff\.net\.0\.proj\.", ".mlp.fc1."),
    (r"\.ff\.net\.2\.", ".mlp.fc2."),
    (r"^norm_out\.norm\.", "final_layer.norm."),
    (r"^norm_out\.linear\.", "final_layer.adaln_proj.linear."),
    (r"^proj_out\.", "final_layer.video_out."),
    (r"^audio_proj_out\.", "final_layer.audio_out."),
)
_ORIGINAL_FIELDS = (
    ("num_layers", "num_layers"),
    ("num_refiner_layers", "token_refiner_num_layers"),
    ("num_attention_heads", "num_attention_heads"),
    ("attention_head_dim", "attention_head_dim"),
    ("hidden_size", "hidden_size"),
    ("ffn_dim", "ffn_hidden_size"),
    ("in_channels", "latents_dim"),
    ("audio_in_channels", "audio_latents_dim"),
    ("patch_size", "patch_size"),
    ("text_dim", "text_dim"),
    ("freq_dim", "timestep_input_dim"),
    ("time_embed_hidden_dim", "time_embed_hidden_size"),
    ("time_embed_dim", "time_embed_dim"),
    ("rope_freq_dim", "rope_inv_freq_len"),
)


class Stored(NamedTuple):
    """One stored tensor: its shape and dtype, and the parameters whose rows it holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    names: tuple[str, ...]


def check_key_layout(key_layout: str) -> None:
    """**Raises:** CheckpointError unless `key_layout` is one of the two."""
    if key_layout not in FILE_STEM:
        raise CheckpointError("key layout", key_layout, ", ".join(FILE_STEM))


def stored_key(name: str, key_layout: str) -> str:
    """The key under which the rows of the parameter `name` are stored."""
    if key_layout == ORIGINAL:
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
    return name


def stored_rows(name: str, key_layout: str, size: ModelSize, rows: range) -> Iterator[range]:
    """The stored rows that hold `rows` of the parameter `name`, as runs.

    **Order:** that of `rows`: the runs, one after the other, are the rows asked for.
    """
    qkv = _QKV.fullmatch(name) if key_layout == ORIGINAL else None
    if qkv:
        head_dim, part = size.attention_head_dim, "qkv".index(qkv[2])
        yield from _shifted(rows, head_dim, lambda head: (2 * head + part) * head_dim)
    elif key_layout == ORIGINAL and _GATED.fullmatch(name):
        ffn = size.ffn_dim
        yield from _shifted(rows, ffn, lambda half: (ffn, -ffn)[half])
    else:
        yield rows


def _shifted(rows: range, width: int, shift_of) -> Iterator[range]:
    """`rows` cut at multiples of `width`, the piece inside [i * width, (i + 1) * width) moved by
    shift_of(i). Head i of q, k or v lies 2 i heads further on, plus its place among the three."""
    for i in range(rows.start // width, -(-rows.stop // width)):
        start, stop = max(rows.start, i * width), min(rows.stop, (i + 1) * width)
        yield range(start + shift_of(i), stop + shift_of(i))


def stored_tensors(
    size: ModelSize, key_layout: str, names: Iterable[str] | None = None
) -> dict[str, Stored]:
    """Key, shape and dtype of every stored tensor that holds rows of `names` (all when None).

    638 tensors in the diffusers layout of `full`, 535 in the original one, in module order.

    **Raises:** CheckpointError for an unknown key layout or name.
    """
    check_key_layout(key_layout)
    table = parameters(size)
    wanted = set(table if names is None else names)
    if wanted - set(table):
        unknown = sorted(wanted - set(table))
        raise CheckpointError("parameter names", unknown, f"parameters of {size.name}")
    stored: dict[str, Stored] = {}
    for name, parameter in table.items():
        key = stored_key(name, key_layout)
        stored[key] = _with(stored.get(key), name, parameter)
    stored = {key: entry for key, entry in stored.items() if wanted.intersection(entry.names)}
    if key_layout == ORIGINAL and names is None:
        stored[ROPE_KEY] = Stored((size.rope_freq_dim,), torch.float32, ())
    return stored


def _with(entry: Stored | None, name: str, parameter: Parameter) -> Stored:
    """`entry` with the rows of one more parameter."""
    if entry is None:
        return Stored(*parameter, (name,))
    rows = entry.shape[0] + parameter.shape[0]
    return Stored((rows, *entry.shape[1:]), entry.dtype, (*entry.names, name))


def rope_inv_freq(size: ModelSize) -> torch.Tensor:
    """FP32 [rope_freq_dim]: theta^(-2i / 2n), as the original layout stores it."""
    n = size.rope_freq_dim
    return 1.0 / size.rope_theta ** (torch.arange(0, 2 * n, 2, dtype=torch.float32) / (2 * n))


def config(size: ModelSize, key_layout: str) -> dict[str, object]:
    """The contents of `config.json` that describe `size`, under the key layout's own names."""
    eps = dict.fromkeys(("norm_eps", "qk_norm_eps", "final_norm_eps"), size.norm_eps)
    values = {field: getattr(size, field) for field, _ in _ORIGINAL_FIELDS}
    values["patch_size"] = list(size.patch_size)
    if key_layout == DIFFUSERS:
        return {**values, "rope_theta": size.rope_theta, **eps}
    return {
        **{original: values[field] for field, original in _ORIGINAL_FIELDS},
        "adaln_out_features": NUM_MODALITIES * NUM_MODULATIONS * size.hidden_size,
        "final_adaln_out_features": 2 * size.hidden_size,
        **eps,
    }


def detect_key_layout(keys: Iterable[str]) -> str | None:
    """The key layout whose names `keys` are, or None if it is neither or both."""
    roots = {key.split(".")[0] for key in keys}
    marks = {
        DIFFUSERS: {"proj_in", "audio_proj_in", "transformer_blocks", "norm_out"},
        ORIGINAL: {"video_patch_proj", "audio_patch_proj", "blocks", "final_layer"},
    }
    found = [key_layout for key_layout, names in marks.items() if names & roots]
    return found[0] if len(found) == 1 else None
