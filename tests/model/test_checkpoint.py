"""Released checkpoints: both key layouts, slices, bad folders, and loading by diffusers itself."""

import json
import math
import shutil

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from h3lib.contract import SIZES, CheckpointError, Contract, OperandError
from h3lib.layout import Layout, Ownership, region_shape
from h3lib.model import checkpoint
from h3lib.model.checkpoint import CheckpointWeights, write_checkpoint
from h3lib.model.released import (
    config,
    detect_key_layout,
    rope_inv_freq,
    stored_key,
    stored_rows,
    stored_tensors,
)
from h3lib.model.weights import SyntheticWeights, digest, parameters
from h3lib.parallel.shard import parameter_region

TINY, FULL = SIZES["tiny"], SIZES["full"]
SOURCE = SyntheticWeights(TINY, seed=11)
KEY_LAYOUTS = ("diffusers", "original")
BLOCK_0 = tuple(name for name in SOURCE.names if name.startswith("transformer_blocks.0."))
TO_Q, GATED = "transformer_blocks.0.attn.to_q.weight", "transformer_blocks.0.ff.net.0.proj.weight"


@pytest.fixture(scope="module", params=KEY_LAYOUTS)
def written(request, tmp_path_factory):
    """(key layout, folder) of a checkpoint of a few shards; not to be changed."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, SOURCE, request.param, max_shard_bytes=600_000)
    return request.param, folder


@pytest.fixture
def spoiled(written, tmp_path):
    """(key layout, folder) of a copy that a test may spoil."""
    key_layout, folder = written
    return key_layout, shutil.copytree(folder, tmp_path / "copy")


def index_path(folder):
    (path,) = folder.glob("*.index.json")
    return path


def weight_map(folder) -> dict[str, str]:
    return json.loads(index_path(folder).read_text())["weight_map"]


def edit_json(path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_shard(folder, key, change) -> str:
    """Apply `change` to the tensors of the shard that holds `key`; its file name."""
    file = weight_map(folder)[key]
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    return file


def problems(folder, **options) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as error:
        CheckpointWeights(folder, TINY, **options)
    assert str(folder) in error.value.subject
    return error.value.received


def load_all(folder) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and digest(a) == digest(b)


def test_every_tensor_comes_back(written):
    key_layout, folder = written
    weights = CheckpointWeights(folder, TINY)
    assert weights.key_layout == key_layout and weights.names == SOURCE.names
    for name in SOURCE.names:
        assert same_bytes(weights.read(name), SOURCE.read(name)), name


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_rank_reads_its_own_slice(written, tp):
    owner, weights = Ownership.of(Layout(tp), 264, Contract()), CheckpointWeights(written[1], TINY)
    for name in BLOCK_0:
        for rank in range(tp):
            region = parameter_region(name, weights.shape(name), owner, rank)
            assert same_bytes(weights.read(name, region), SOURCE.read(name, region)), (name, rank)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_region_is_the_same_in_both_key_layouts(tmp_path_factory, data):
    weights = data.draw(st.sampled_from(_both(tmp_path_factory)))
    name = data.draw(st.sampled_from((*BLOCK_0, "proj_in.weight", "time_embedder.linear_2.bias")))
    region = []
    for size in SOURCE.shape(name):
        edge = st.integers(0, size)
        pairs = data.draw(st.lists(st.tuples(edge, edge), min_size=1, max_size=3))
        region.append(tuple(range(min(pair), max(pair)) for pair in pairs))
    assert same_bytes(weights.read(name, tuple(region)), SOURCE.read(name, tuple(region)))


_BOTH: list[CheckpointWeights] = []


def _both(tmp_path_factory) -> list[CheckpointWeights]:
    """One reader a key layout, made once: hypothesis does not renew function fixtures."""
    if not _BOTH:
        for key_layout in KEY_LAYOUTS:
            folder = tmp_path_factory.mktemp(key_layout)
            write_checkpoint(folder, SOURCE, key_layout)
            _BOTH.append(CheckpointWeights(folder, TINY))
    return _BOTH


def test_original_rows_are_interleaved_and_swapped(tmp_path):
    """Against the format as it is described, not against the reader."""
    write_checkpoint(tmp_path, SOURCE, "original")
    stored = load_all(tmp_path)
    heads, head_dim, hidden = TINY.num_attention_heads, TINY.attention_head_dim, TINY.hidden_size
    blocks = {"blocks.1": "transformer_blocks.1"}
    blocks["token_refiner.blocks.0"] = "token_refiner.refiner_blocks.0"
    for original, name in blocks.items():
        qkv = stored[f"{original}.attn.qkv_proj.weight"].view(heads, 3, head_dim, hidden)
        for axis, part in enumerate("qkv"):
            expected = SOURCE.read(f"{name}.attn.to_{part}.weight")
            assert same_bytes(qkv[:, axis].reshape(TINY.inner_dim, hidden), expected)
        gate, value = stored[f"{original}.mlp.fc1.weight"].chunk(2)
        assert same_bytes(torch.cat([value, gate]), SOURCE.read(f"{name}.ff.net.0.proj.weight"))
    assert same_bytes(stored["rope.inv_freq"], rope_inv_freq(TINY))
    renamed = {
        "video_patch_proj.weight": "proj_in.weight",
        "audio_patch_proj.bias": "audio_proj_in.bias",
        "condition_proj.weight": "context_embedder.weight",
        "time_embedder.proj_in.weight": "time_embedder.linear_1.weight",
        "time_embedder.proj_out.bias": "time_embedder.linear_2.bias",
        "blocks.0.attn.q_norm.weight": "transformer_blocks.0.attn.norm_q.weight",
        "blocks.0.attn.k_norm.weight": "transformer_blocks.0.attn.norm_k.weight",
        "blocks.0.attn.out_proj.weight": "transformer_blocks.0.attn.to_out.0.weight",
        "blocks.0.mlp.fc2.weight": "transformer_blocks.0.ff.net.2.weight",
        "blocks.0.adaln_proj.linear.bias": "transformer_blocks.0.adaln_proj.linear.bias",
        "blocks.0.norm1.weight": "transformer_blocks.0.norm1.weight",
        "token_refiner.blocks.1.norm2.weight": "token_refiner.refiner_blocks.1.norm2.weight",
        "token_refiner.final_norm.weight": "token_refiner.final_norm.weight",
        "final_layer.norm.weight": "norm_out.norm.weight",
        "final_layer.adaln_proj.linear.weight": "norm_out.linear.weight",
        "final_layer.video_out.weight": "proj_out.weight",
        "final_layer.audio_out.bias": "audio_proj_out.bias",
    }
    for original, name in renamed.items():
        assert stored_key(name, "original") == original
        assert same_bytes(stored[original], SOURCE.read(name)), original


def thirds(tensors):
    """A file whose q, k and v rows are three contiguous thirds, as re-exports store them."""
    qkv = tensors["blocks.0.attn.qkv_proj.weight"]
    by_head = qkv.view(TINY.num_attention_heads, 3, TINY.attention_head_dim, -1)
    tensors["blocks.0.attn.qkv_proj.weight"] = by_head.transpose(0, 1).reshape(qkv.shape).clone()


def unswapped(tensors):
    """A file whose FFN halves are [value; gate]."""
    tensors["blocks.0.mlp.fc1.weight"] = tensors["blocks.0.mlp.fc1.weight"].roll(TINY.ffn_dim, 0)


@pytest.mark.parametrize(
    ("change", "names"),
    [(thirds, [TO_Q, TO_Q.replace("to_q", "to_k"), TO_Q.replace("to_q", "to_v")]),
     (unswapped, [GATED])],
)  # fmt: skip
def test_the_silent_errors_of_the_original_layout_change_bytes(tmp_path, change, names):
    """Shapes are right in such a file, so only values can tell; every tensor concerned differs."""
    write_checkpoint(tmp_path, SOURCE, "original")
    edit_shard(tmp_path, stored_key(names[0], "original"), change)
    weights = CheckpointWeights(tmp_path, TINY)
    for name in names:
        assert digest(weights.read(name)) != digest(SOURCE.read(name)), name


def test_counts_and_size_of_the_released_files():
    for key_layout, count in (("diffusers", 638), ("original", 535)):
        assert len(stored_tensors(FULL, key_layout)) == count
    original = stored_tensors(FULL, "original")
    num_bytes = sum(math.prod(s.shape) * s.dtype.itemsize for s in original.values())
    assert num_bytes == 66_280_430_144  # as the released index says
    assert original["blocks.0.attn.qkv_proj.weight"].shape == (21_504, 5_376)


def test_stored_rows_of_one_rank_are_its_heads():
    runs = stored_rows("transformer_blocks.0.attn.to_k.weight", "original", FULL, range(896, 1792))
    assert list(runs) == [range(384 * head + 128, 384 * head + 256) for head in range(7, 14)]
    name = "transformer_blocks.0.ff.net.0.proj.weight"
    runs = stored_rows(name, "original", FULL, range(14_000, 15_000))
    assert list(runs) == [range(28_336, 28_672), range(0, 664)]


def test_shards_index_and_config(written):
    key_layout, folder = written
    stem = {"diffusers": "diffusion_pytorch_model", "original": "model"}[key_layout]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    expected = [f"{stem}-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert files == expected and len(files) > 2
    stored, index = load_all(folder), json.loads(index_path(folder).read_text())
    assert index_path(folder).name == f"{stem}.safetensors.index.json"
    assert set(index["weight_map"]) == set(stored) == set(stored_tensors(TINY, key_layout))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    for file in files:
        tensors = load_file(folder / file)
        assert set(tensors) == {key for key, where in index["weight_map"].items() if where == file}
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 600_000
    fields = json.loads((folder / "config.json").read_text())
    assert fields["hidden_size"] == 96 and fields["norm_eps"] == 1e-5
    name = "num_refiner_layers" if key_layout == "diffusers" else "token_refiner_num_layers"
    assert fields[name] == 2


def test_one_shard_at_a_time_is_written(tmp_path, monkeypatch):
    """Each tensor is read once, and every shard is on disk before the next is read."""
    log = []

    class Logged(SyntheticWeights):
        def read(self, name, region=None):
            log.append(name)
            return super().read(name, region)

    def save(tensors, path, metadata):
        log.append(sum(t.nbytes for t in tensors.values()))
        save_file(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", save)
    write_checkpoint(tmp_path, Logged(TINY), "diffusers", max_shard_bytes=600_000)
    assert [name for name in log if isinstance(name, str)] == list(SOURCE.names)
    largest = max(math.prod(p.shape) * p.dtype.itemsize for p in parameters(TINY).values())
    assert max(n for n in log if isinstance(n, int)) <= max(600_000, largest)
    assert isinstance(log[-1], int) and sum(isinstance(n, int) for n in log) > 2


def test_no_more_than_the_slice_is_read(written, monkeypatch):
    key_layout, folder = written
    weights = CheckpointWeights(folder, TINY)
    taken, real = [], checkpoint.safe_open

    class OnlySlices:
        def __init__(self, *args, **options):
            self.file = real(*args, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def get_slice(self, key):
            inner = self.file.get_slice(key)

            class Counted:
                def __getitem__(self, where):
                    taken.append(inner[where])
                    return taken[-1]

            return Counted()

    monkeypatch.setattr(checkpoint, "safe_open", OnlySlices)
    owner = Ownership.of(Layout(4), 264, Contract())
    for name in BLOCK_0:
        region = parameter_region(name, weights.shape(name), owner, 2)
        taken.clear()
        assert same_bytes(weights.read(name, region), SOURCE.read(name, region))
        assert sum(part.numel() for part in taken) == math.prod(region_shape(region)), name
    taken.clear()
    weights.read(TO_Q, ((range(32, 96),), (range(96),)))  # heads 1 and 2
    assert len(taken) == (2 if key_layout == "original" else 1)


def test_opening_reads_headers_only(written, monkeypatch):
    monkeypatch.delattr(checkpoint, "safe_open")
    assert CheckpointWeights(written[1], TINY).dtype(TO_Q) == torch.bfloat16


def test_the_shards_of_block_0_suffice(spoiled):
    key_layout, folder = spoiled
    needed = {weight_map(folder)[stored_key(name, key_layout)] for name in BLOCK_0}
    for path in folder.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    weights = CheckpointWeights(folder, TINY, names=BLOCK_0)
    for name in BLOCK_0:
        assert same_bytes(weights.read(name), SOURCE.read(name))
    with pytest.raises(CheckpointError) as error:
        weights.read("proj_in.weight")
    assert error.value.received == "proj_in.weight"
    assert any("missing shard" in problem for problem in problems(folder))


def test_a_part_can_be_written_alone(tmp_path):
    write_checkpoint(tmp_path, SOURCE, "original", names=BLOCK_0)
    assert len(weight_map(tmp_path)) == 10
    weights = CheckpointWeights(tmp_path, TINY, names=BLOCK_0)
    assert same_bytes(weights.read(TO_Q), SOURCE.read(TO_Q))


def test_original_to_diffusers_by_way_of_a_reader(tmp_path):
    write_checkpoint(tmp_path / "a", SOURCE, "original")
    write_checkpoint(tmp_path / "b", CheckpointWeights(tmp_path / "a", TINY), "diffusers")
    write_checkpoint(tmp_path / "c", SOURCE, "diffusers")
    files = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for file in files:
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "c" / file).read_bytes()


def test_diffusers_loads_what_is_written(tmp_path):
    write_checkpoint(tmp_path, SOURCE, "diffusers", max_shard_bytes=10**6)
    model = MiniMaxH3Transformer3DModel.from_config(
        MiniMaxH3Transformer3DModel.load_config(tmp_path)
    )
    model.load_state_dict(load_all(tmp_path), strict=True)
    state = model.state_dict()
    assert set(state) == set(SOURCE.names)
    for name, tensor in state.items():
        assert torch.equal(tensor, SOURCE.read(name).to(tensor.dtype)), name
    assert {field: model.config[field] for field in config(TINY, "diffusers")} | {
        "patch_size": [1, 2, 2]
    } == config(TINY, "diffusers")


def test_missing_index(spoiled):
    _, folder = spoiled
    index_path(folder).unlink()
    (problem,) = problems(folder)
    assert "missing index" in problem and "model.safetensors.index.json" in problem
    (problem,) = problems(folder / "nowhere")
    assert "missing index" in problem


def test_two_indexes(spoiled):
    _, folder = spoiled
    for stem in ("model", "diffusion_pytorch_model"):
        (folder / f"{stem}.safetensors.index.json").write_text("{}")
    assert "two indexes" in problems(folder)[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": '])
def test_unreadable_index(spoiled, text):
    _, folder = spoiled
    index_path(folder).write_text(text)
    (problem,) = problems(folder)
    assert "unreadable index" in problem and index_path(folder).name in problem


@pytest.mark.parametrize("shard", ["../x.safetensors", 7, None, ["x.safetensors"], {"x": 1}])
def test_shards_that_are_no_files_of_the_folder(spoiled, shard):
    key_layout, folder = spoiled
    key = stored_key(GATED, key_layout)
    edit_json(index_path(folder), lambda v: v["weight_map"].update({key: shard}))
    (problem,) = problems(folder)
    assert f"shard {shard!r} in {index_path(folder).name}: not a file name" in problem


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("here before")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="accepted: an empty folder"):
            write_checkpoint(path, SOURCE)
    assert (tmp_path / "file").read_text() == "here before"


def test_missing_shard(spoiled):
    key_layout, folder = spoiled
    key = stored_key(GATED, key_layout)
    (folder / weight_map(folder)[key]).unlink()
    (problem,) = problems(folder)
    assert "missing shard" in problem and weight_map(folder)[key] in problem


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated_shard(spoiled, kept):
    key_layout, folder = spoiled
    path = folder / weight_map(folder)[stored_key(GATED, key_layout)]
    path.write_bytes(path.read_bytes()[:kept])
    (problem,) = problems(folder)
    assert "truncated" in problem and path.name in problem


def test_shard_with_trailing_bytes(spoiled):
    key_layout, folder = spoiled
    path = folder / weight_map(folder)[stored_key(GATED, key_layout)]
    path.write_bytes(path.read_bytes() + b"x")
    (problem,) = problems(folder)
    assert "too long" in problem and path.name in problem


def test_a_shard_that_is_something_else(spoiled):
    key_layout, folder = spoiled
    path = folder / weight_map(folder)[stored_key(GATED, key_layout)]
    path.write_bytes((16).to_bytes(8, "little") + b"not a header at all")
    (problem,) = problems(folder)
    assert "unreadable header" in problem and path.name in problem


@pytest.mark.parametrize("field, value", [("dtype", []), ("shape", "ab"), ("shape", 3)])
def test_a_header_with_values_of_other_types_is_named(spoiled, field, value):
    key_layout, folder = spoiled
    path = folder / weight_map(folder)[stored_key(GATED, key_layout)]
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    next(entry for name, entry in header.items() if name != "__metadata__")[field] = value
    text = json.dumps(header).encode()
    data = path.read_bytes()[8 + length :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    (problem,) = problems(folder)
    assert "unreadable header" in problem and path.name in problem


def test_tensor_missing_from_the_index(spoiled):
    key_layout, folder = spoiled
    key = stored_key(GATED, key_layout)
    edit_json(index_path(folder), lambda v: v["weight_map"].pop(key))
    (problem,) = problems(folder)
    assert problem.startswith(f"missing tensor {key}") and "index" in problem


def test_tensor_missing_from_its_shard(spoiled):
    key_layout, folder = spoiled
    key = stored_key(GATED, key_layout)
    file = edit_shard(folder, key, lambda tensors: tensors.pop(key))
    (problem,) = problems(folder)
    assert problem.startswith(f"missing tensor {key}") and file in problem


def test_mis_shaped_tensor(spoiled):
    key_layout, folder = spoiled
    key = stored_key(GATED, key_layout)
    file = edit_shard(folder, key, lambda t: t.update({key: t[key].T.contiguous()}))
    (problem,) = problems(folder)
    assert "mis-shaped" in problem and key in problem and file in problem
    assert "(96, 512)" in problem and "(512, 96)" in problem


def test_wrong_dtype(spoiled):
    key_layout, folder = spoiled
    keys = [stored_key(name, key_layout) for name in (GATED, "proj_in.weight")]
    edit_shard(folder, keys[0], lambda t: t.update({keys[0]: t[keys[0]].float()}))
    edit_shard(folder, keys[1], lambda t: t.update({keys[1]: t[keys[1]].bfloat16()}))
    found = problems(folder)
    assert len(found) == 2 and all("wrong dtype" in problem for problem in found)
    assert {key for key in keys for problem in found if key in problem} == set(keys)


def test_pruned_re_export(spoiled):
    key_layout, folder = spoiled
    table = torch.zeros(1025, 8)

    def prune(value):
        shard = value["weight_map"]
        for key in [key for key in shard if key.startswith("time_embedder.")]:
            del shard[key]
        shard["adaln_t_table"] = "table.safetensors"

    save_file({"adaln_t_table": table}, folder / "table.safetensors")
    edit_json(index_path(folder), prune)
    for names in (None, BLOCK_0):
        assert any("pruned re-export: adaln_t_table" in p for p in problems(folder, names=names))
    edit_json(index_path(folder), lambda v: v["weight_map"].pop("adaln_t_table"))
    found = problems(folder)
    assert any("pruned re-export: nothing" in problem for problem in found)
    assert sum("missing tensor time_embedder" in problem for problem in found) == 4


@pytest.mark.parametrize(
    "keys",
    [["layers.0.weight", "time_embedder.x"], ["proj_in.weight", "blocks.0.norm1.weight"], []],
)
def test_unknown_key_layout(spoiled, keys):
    _, folder = spoiled
    shard = dict.fromkeys(keys, "x.safetensors")
    edit_json(index_path(folder), lambda value: value.update(weight_map=shard))
    assert "unknown key layout" in problems(folder, names=BLOCK_0)[-1]
    assert detect_key_layout(keys) is None


def test_config_of_another_size(spoiled):
    key_layout, folder = spoiled
    edit_json(folder / "config.json", lambda value: value.update(num_attention_heads=8))
    assert problems(folder) == ("config.json: num_attention_heads is 8, expected 16",)
    (folder / "config.json").write_text("{")
    assert "unreadable config.json" in problems(folder)[0]
    (folder / "config.json").unlink()
    assert CheckpointWeights(folder, TINY).key_layout == key_layout


def test_all_that_is_wrong_is_listed_at_once(spoiled):
    key_layout, folder = spoiled
    norm, query = (stored_key(name, key_layout) for name in (BLOCK_0[0], TO_Q))
    proj = stored_key("proj_in.weight", key_layout)
    edit_shard(folder, norm, lambda t: t.update({norm: t[norm][:5].clone()}))
    edit_shard(folder, proj, lambda t: t.update({proj: t[proj].half()}))
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    edit_json(index_path(folder), lambda value: value["weight_map"].pop(query))
    edit_json(folder / "config.json", lambda value: value.update(hidden_size=1))
    found = "\n".join(problems(folder))
    for words in (f"mis-shaped tensor {norm}", f"wrong dtype of tensor {proj}", last.name,
                  f"missing tensor {query}", "config.json: hidden_size"):  # fmt: skip
        assert words in found
    assert len(found.splitlines()) == 5


def test_another_size_is_refused(written):
    with pytest.raises(CheckpointError) as error:
        CheckpointWeights(written[1], SIZES["small"])
    assert sum("mis-shaped" in problem for problem in error.value.received) > 40


def test_bad_regions_and_names_are_refused(written):
    weights = CheckpointWeights(written[1], TINY)
    with pytest.raises(OperandError):
        weights.read(TO_Q, ((range(513),), (range(96),)))
    with pytest.raises(CheckpointError):
        CheckpointWeights(written[1], TINY, names=["blocks.0.norm1.weight"])


def test_writing_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("kept")
    with pytest.raises(CheckpointError, match="empty folder"):
        write_checkpoint(tmp_path / "full", SOURCE)
    with pytest.raises(CheckpointError, match="diffusers, original"):
        write_checkpoint(tmp_path / "a", SOURCE, "gguf")
    with pytest.raises(CheckpointError, match="at least 1 byte"):
        write_checkpoint(tmp_path / "b", SOURCE, max_shard_bytes=0)
    with pytest.raises(CheckpointError, match="to_k"):
        write_checkpoint(tmp_path / "c", SOURCE, "original", names=[TO_Q])
    with pytest.raises(CheckpointError, match="no.such"):
        write_checkpoint(tmp_path / "d", SOURCE, names=["no.such"])


def test_an_unfinished_write_is_no_checkpoint(tmp_path, monkeypatch):
    def full_disk(tensors, path, metadata):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError):
        write_checkpoint(tmp_path, SOURCE)
    assert "missing index" in problems(tmp_path)[0]
