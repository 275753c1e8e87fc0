"""The model as users hold it: one object on every rank, from a checkpoint folder, in any layout.

    from h3lib import H3Transformer

    model = H3Transformer.from_checkpoint("MiniMax-H3/transformer", layout="tp4-cp2-sp")
    latents = model.generate("832x480x124", text, points=9, seed=0)

Started by torchrun (or srun), each rank reads its own slices and nothing else. A PyTorch module:
`forward` takes what diffusers' MiniMaxH3Transformer3DModel takes, parameters have its names (the
rank's parts of them), and one autograd node holds the model, so that gradients are the contract's.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn
from tqdm import tqdm

from h3lib.contract import PUBLISHED, LayoutError, ModelSize, OperandError
from h3lib.folders import folder_size
from h3lib.layout import Layout, Ownership
from h3lib.model.checkpoint import CheckpointWeights
from h3lib.model.inputs import rank_weights
from h3lib.model.module import add_parameter
from h3lib.model.packing import Job, Packed, pack
from h3lib.model.sampler import Sampler, first_latents, unpatchify
from h3lib.model.transformer import BLOCK_INPUTS, NOTHING, SAVED, Inputs, Transformer
from h3lib.model.weights import SyntheticWeights, WeightSource
from h3lib.ops.backend import load_backend
from h3lib.parallel.gloo import launched, require_same, world_size
from h3lib.parallel.levels import Levels, join
from h3lib.parallel.mesh import Mesh, build_mesh, local_mesh
from h3lib.parallel.shard import SeqShard
from h3lib.report import environment, fingerprint
from h3lib.request import check_place

_KEPT = tuple(kept for kept in SAVED if kept != NOTHING)  # a backward needs one of these
_JOB = Job(0, 0, 0, text_rows=1)  # a job that says nothing: rows come with their own metadata


class H3Transformer(nn.Module):
    """velocities = model(rows, metadata); made by `from_checkpoint` or `synthetic`.

    `saved`: what a forward with gradients keeps, the blocks' inputs ("block inputs", the blocks are
    computed again) or every activation ("activations"); the bytes are the same.
    """

    def __init__(
        self,
        source: WeightSource,
        layout: Layout,
        rank: int,
        mesh: Mesh,
        backend: str = "eager",
        saved: str = BLOCK_INPUTS,
        levels: Levels | None = None,
    ):
        super().__init__()
        if saved not in _KEPT:
            raise OperandError("what to save", saved, ", ".join(_KEPT))
        load_backend(backend, source.device.type)
        self.size, self.layout, self.rank, self.mesh = source.size, layout, rank, mesh
        self.backend, self.saved, self.levels = backend, saved, levels
        place = SeqShard(Ownership.of(layout, 1, PUBLISHED), rank, mesh)
        for name, value in rank_weights(source.size, source, place).items():
            add_parameter(self, name.split("."), value)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str,
        layout: str = "tp1",
        size: str | None = None,
        device: str = "cpu",
        backend: str = "eager",
        saved: str = BLOCK_INPUTS,
        timeout_s: float = 600.0,
    ) -> H3Transformer:
        """The model in a released folder, diffusers or original key layout, on this rank's place.

        `size` is that of `config.json` unless it is named; `timeout_s`: how long ranks wait for
        each other.

        **Raises:** CheckpointError with every problem of the folder, LayoutError for a layout that
        does not fit the ranks that were started, RequestError for a device that is not here or a
        timeout that cannot be, PeerError for a rank whose software differs.
        """
        known = folder_size(folder, size)
        layout, rank, mesh, levels = _join(layout, device, timeout_s)
        source = CheckpointWeights(folder, known, None, device)
        return cls(source, layout, rank, mesh, backend, saved, levels)

    @classmethod
    def synthetic(
        cls,
        size: ModelSize,
        layout: str = "tp1",
        seed: int = 0,
        device: str = "cpu",
        backend: str = "eager",
        saved: str = BLOCK_INPUTS,
        timeout_s: float = 600.0,
    ) -> H3Transformer:
        """The same with synthetic weights, made in place.

        **Raises:** as `from_checkpoint`; OperandError for a `size` that is none."""
        if not isinstance(size, ModelSize):
            raise OperandError("model size", size, "a ModelSize: of model_size(name), or your own")
        layout, rank, mesh, levels = _join(layout, device, timeout_s)
        source = SyntheticWeights(size, seed, device)
        return cls(source, layout, rank, mesh, backend, saved, levels)

    def close(self) -> None:
        """Leave the process group."""
        if self.levels is not None:
            self.levels.close()
            self.levels = None

    def forward(
        self,
        hidden_states: Tensor,
        audio_hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        timestep_indices: Tensor,
        token_tags: Tensor,
        position_ids: Tensor,
        video_indices: Tensor,
        audio_indices: Tensor,
        text_indices: Tensor,
        logical_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of video `[1, Nv, 96]` and audio `[1, Na, 32]` rows, FP32, on every rank.

        Rows `[1, n, width]` in the order of their indices; the rest as in diffusers. Without
        `logical_keys` rows are ordered as they are packed.

        **Raises:** OperandError for a batch of more than one, RowsError for rows that do not fit.
        """
        rows = (hidden_states, audio_hidden_states, encoder_hidden_states)
        for name, tensor in zip(("video", "audio", "text"), rows, strict=True):
            if tensor.ndim != 3 or len(tensor) != 1:
                raise OperandError(f"shape of {name} rows", tuple(tensor.shape), "(1, rows, width)")
        if logical_keys is None:
            row = torch.arange(len(token_tags), device=token_tags.device)
            logical_keys = torch.stack((torch.zeros_like(row), row), dim=1)
        metadata = Packed(
            _JOB, position_ids, token_tags, timestep, timestep_indices, logical_keys,
            video_indices, audio_indices, text_indices,
        )  # fmt: skip
        names, weights = zip(*self.named_parameters(), strict=True)
        saved = self.saved if torch.is_grad_enabled() else NOTHING
        rows = (x[0] for x in rows)
        video, audio = _Model.apply(self, metadata, saved, names, *rows, *weights)
        return video[None], audio[None]

    def at_rows(self, num_rows: int, weights: dict[str, Tensor]) -> Transformer:
        """The model of one forward of this many active rows."""
        owner = Ownership.of(self.layout, num_rows, PUBLISHED)
        return Transformer(self.size, SeqShard(owner, self.rank, self.mesh), weights, self.backend)

    @torch.no_grad()
    def generate(
        self, job: Job | str, text: Tensor, points: int, seed: int = 0, conditions=()
    ) -> dict[str, Tensor]:
        """Latents of a request: "video" `[24, frames, height, width]`, "audio" `[rows, 32]`, FP32.

        `text` `[L, text_dim]`: hidden states of the prompt; `points` grid points make one step
        less; `conditions`: clean latents of the job's keyframes. The bytes depend on the request
        and the weights, not on the layout.

        **Raises:** OperandError for a text of another width or kind, or a seed that cannot be,
        RowsError for a job that the model cannot pack.
        """
        _check_text(text, self.size.text_dim)
        if isinstance(job, str):
            job = Job.parse(job, text_rows=len(text))
        device = text.device
        sampler, packed = Sampler.of(job, points), pack(job).to(device)
        start = first_latents(job, self.size, seed, tuple(conditions)).to(device)
        bar = tqdm(
            sampler.rollout(self._velocity, start, text, packed),
            "generate", sampler.video.num_steps, unit="step",
            disable=None if self.rank == 0 else True,
        )  # fmt: skip
        *_, (_, last) = bar
        video = unpatchify(last.video[job.num_condition_rows :], job, self.size)
        return {"video": video, "audio": last.audio}

    def _velocity(self, inputs: Inputs) -> dict[str, Tensor]:
        packed = inputs.packed
        metadata = {f.name: getattr(packed, f.name) for f in fields(packed) if f.name != "job"}
        rows = (inputs.video[None], inputs.audio[None], inputs.text[None])
        video, audio = self(*rows, **metadata)
        return {"video": video[0], "audio": audio[0]}


def _check_text(text: object, width: int) -> None:
    accepted = f"a floating-point tensor [L, {width}]"
    if not isinstance(text, Tensor):
        raise OperandError("text", text, accepted)
    if text.ndim != 2 or text.shape[1] != width or not text.is_floating_point():
        raise OperandError("text", f"{text.dtype} {list(text.shape)}", accepted)


def _join(
    name: str, device: str, timeout_s: float
) -> tuple[Layout, int, Mesh, Levels | None]:
    """This process's place among the ranks that were started, all with the same software."""
    check_place(device, timeout_s)
    layout, ranks = Layout.parse(name), world_size() if launched() else 1
    if ranks != layout.num_ranks:
        accepted = f"{layout.num_ranks} for {layout.name}: torchrun --nproc-per-node ..."
        raise LayoutError("number of ranks", ranks, accepted)
    if not launched():
        return layout, 0, local_mesh(), None
    on_gpu = device == "cuda"
    world, levels = join(layout, timeout_s, "peer" if on_gpu else "gloo", on_gpu)
    require_same(world, fingerprint(environment(device, "")) | {"layout": layout.name})
    return layout, world.rank, build_mesh(layout, world.rank, levels), levels


class _Model(torch.autograd.Function):
    """One autograd node: the contract's forward and backward of everything."""

    @staticmethod
    def forward(ctx, module, packed, saved, names, video, audio, text, *weights):
        held = dict(zip(names, weights, strict=True))
        active = int((packed.logical_keys[:, 0] >= 0).sum())
        model = module.at_rows(active, held)
        found = model.forward(Inputs(video, audio, text.to(model.dtype), packed), saved)
        if saved != NOTHING:
            ctx.save_for_backward(*weights)
            ctx.model, ctx.names, ctx.dtypes = model, names, (video.dtype, audio.dtype, text.dtype)
        return found["video"], found["audio"]

    @staticmethod
    def backward(ctx, dvideo, daudio):
        _ = ctx.saved_tensors  # raises if one was changed in place since the forward
        wanted = any(ctx.needs_input_grad[4:7])
        found = ctx.model.backward(dvideo.contiguous(), daudio.contiguous(), wanted)
        given = [None] * 3
        if wanted:
            names = zip(("video", "audio", "text"), ctx.dtypes, strict=True)
            given = [found.inputs[name].to(dtype) for name, dtype in names]
        return None, None, None, None, *given, *(found.parameters[name] for name in ctx.names)
