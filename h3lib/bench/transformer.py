"""The whole model on one GPU beside diffusers': `python -m h3lib.bench.transformer --out FILE`.

    ours     Transformer, back end `triton`, a world of one
    theirs   MiniMaxH3Transformer3DModel, eager, BF16 and FP32 islands as released, SDPA cuDNN

Both hold the same weights, made in place (66 GB for `full`), and see the same rows. Launches take
turns; medians. The forward saves nothing. Forward + backward computes each block again from its
input (theirs: gradient checkpointing), and hands each parameter's gradient out when it is finished:
all of them beside the weights (2 x 66 GB) would not fit.

With `--layout tp2` (a GPU for each rank) ours runs in that layout, theirs still on one GPU, and
`bench/transformer_layout.py` compares every byte of ours with ours on one GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3lib.bench.measure import ALONE, Launch, Ranks, elapsed_ms, slowest
from h3lib.bench.start import start_ranks
from h3lib.contract import PUBLISHED, ModelSize, model_size
from h3lib.files import write_json
from h3lib.layout import Layout
from h3lib.model.inputs import model_inputs, output_gradients, rank_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.transformer import BLOCK_INPUTS, NOTHING, Transformer
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.shard import SeqShard
from h3lib.provenance import gpu_environment

CONFIG = (
    "num_attention_heads", "attention_head_dim", "hidden_size", "num_layers", "num_refiner_layers",
    "ffn_dim", "in_channels", "audio_in_channels", "patch_size", "text_dim", "freq_dim",
    "time_embed_hidden_dim", "time_embed_dim", "rope_freq_dim", "rope_theta", "norm_eps",
)  # fmt: skip
METADATA = (
    "timestep", "timestep_indices", "token_tags", "position_ids", "video_indices", "audio_indices",
    "text_indices",
)  # fmt: skip
DEVICE, BACKEND = "cuda", "triton"
TIMEOUT_S = 420.0


def diffusers_model(size: ModelSize, weights: dict[str, torch.Tensor]):
    """Their model on the same weights and device, without a copy."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel

    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**{name: getattr(size, name) for name in CONFIG})
    device = next(iter(weights.values())).device
    model.rope = type(model.rope)(size.rope_freq_dim, size.rope_theta).to(device)  # is not stored
    model.load_state_dict(weights, assign=True)
    return model


class Case:
    """One number of rows: both models on the same weights and rows; ours at its place `shard`."""

    def __init__(
        self, size: ModelSize, weights: dict[str, torch.Tensor], theirs, rows: int, shard: SeqShard
    ):
        packed = pack(job_for_rows(rows)).to(DEVICE)
        self.inputs = model_inputs(size, packed, 0)
        self.gradients = output_gradients(self.inputs, 0)
        self.ours = Transformer(size, shard, weights, BACKEND)
        self.theirs = theirs
        self.metadata = {name: getattr(packed, name) for name in METADATA}

    def our_forward(self) -> dict[str, torch.Tensor]:
        return self.ours.forward(self.inputs, NOTHING)

    def our_step(self) -> None:
        self.ours.forward(self.inputs, BLOCK_INPUTS)
        self.ours.backward(*self.gradients, take=lambda gradients: None)

    def their_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (self.inputs.video[None], self.inputs.audio[None], self.inputs.text[None])
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.set_grad_enabled(self.theirs.training):
            return self.theirs(*rows, **self.metadata, return_dict=False)

    def their_step(self) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = self.their_forward()
            torch.autograd.backward(out, [gradient[None] for gradient in self.gradients])


def timed(calls: dict[str, Launch], rounds: int, ranks: Ranks = ALONE) -> dict[str, dict]:
    """Milliseconds of each call, of the slowest rank in each turn after a warm-up, their median,
    and peak allocated bytes of this rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks = dict.fromkeys(calls, 0)
    for launch in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            ranks.gather(None)
            torch.cuda.reset_peak_memory_stats()
            took = elapsed_ms(call)
            peaks[name] = torch.cuda.max_memory_allocated()
            if launch:
                times[name].append(took)
    longest = {name: slowest(ranks.gather(launches)) for name, launches in times.items()}
    return {
        name: {"ms": statistics.median(t), "launches_ms": t, "peak_bytes": peaks[name]}
        for name, t in longest.items()
    }


def agreement(case: Case) -> dict[str, float]:
    """|ours - theirs| / |theirs| of both velocities: two BF16 computations of one function."""
    ours, theirs = case.our_forward(), case.their_forward()
    return {
        name: float((ours[name] - other[0].detach()).norm() / other.norm())
        for name, other in zip(("video", "audio"), theirs, strict=True)
    }


def free_gradients(model) -> None:
    """Their training mode: blocks computed again, a gradient dropped when it is finished."""
    model.requires_grad_().train()
    model.enable_gradient_checkpointing()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def measure(size: ModelSize, rows: list[int], rounds: int, train: bool, write) -> None:
    """Every number of rows: forward, then forward + backward; `write` after each."""
    shard = SeqShard.canonical(1)
    weights = rank_weights(size, SyntheticWeights(size, 0, DEVICE), shard)
    theirs = diffusers_model(size, weights).requires_grad_(False).eval()
    held = num_bytes(weights)
    found: list[dict] = []
    for backward in (False, True) if train else (False,):
        if backward:
            free_gradients(theirs)
        for count in rows:
            case = Case(size, weights, theirs, count, SeqShard.canonical(count))
            calls = {"ours": case.our_forward, "theirs": case.their_forward}
            if backward:
                calls = {"ours": case.our_step, "theirs": case.their_step}
            line = {"op": "forward + backward" if backward else "forward", "rows": count}
            try:
                line |= timed(calls, 1 if backward and count > 4096 else rounds)
                line["ratio"] = line["theirs"]["ms"] / line["ours"]["ms"]
                if not backward:
                    line["relative_difference"] = agreement(case)
            except torch.OutOfMemoryError as error:
                line["does_not_fit"] = str(error).splitlines()[0]
            found.append(line)
            print(line, flush=True)
            write(found, held, complete=False)
            del case, calls
            torch.cuda.empty_cache()
    write(found, held, complete=True)


def num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Of all their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_report(
    out: Path,
    size: ModelSize,
    commit: str | None,
    rounds: int,
    found: dict[str, object],
    complete: bool,
) -> None:
    """One JSON; `complete` is its last key."""
    content = {
        "environment": gpu_environment(commit),
        "contract": PUBLISHED.id,
        "size": size.name,
        "blocks": size.num_layers,
        "rounds": rounds,
        **found,
        "complete": complete,
    }
    write_json(out, content)


def start_layout(options: argparse.Namespace) -> None:
    """The same in a layout. **Raises:** PeerError if a rank fails."""
    given = {name: value for name, value in vars(options).items() if name != "out"}
    arguments = [str(options.out.resolve()), json.dumps(given)]
    ranks = Layout.parse(options.layout).num_ranks
    start_ranks("h3lib.bench.transformer_layout", arguments, ranks, TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="commit that is measured, if not this checkout's")
    parser.add_argument("--size", default="full")
    parser.add_argument("--rows", type=int, nargs="+", default=(264, 14910))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="forward + backward too")
    parser.add_argument("--layout", default="tp1", help="tp1, or one with a GPU for each rank")
    options = parser.parse_args()
    if Layout.parse(options.layout).num_ranks > 1:
        start_layout(options)
        return
    size = model_size(options.size)

    def write(found: list[dict], held: int, complete: bool) -> None:
        lists = {"weight_bytes": held, "measurements": found}
        write_report(options.out, size, options.commit, options.rounds, lists, complete)

    measure(size, list(options.rows), options.rounds, options.train, write)


if __name__ == "__main__":
    main()
