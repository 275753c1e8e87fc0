"""`h3lib checkpoint`: inspect, synth, convert; and what one rank reads of a folder."""

import contextlib
import io
import json
import math
import shutil
from typing import NamedTuple

import pytest
import torch
from block_support import TINY, packed_rows, red

from h3lib.cli import main
from h3lib.contract import PUBLISHED
from h3lib.layout import Layout, Ownership, region_shape
from h3lib.model.checkpoint import CheckpointWeights
from h3lib.model.inputs import rank_weights
from h3lib.model.program import ModelProgram
from h3lib.model.transformer import stage_parameters
from h3lib.model.weights import SyntheticWeights, digest, parameters
from h3lib.parallel.mesh import local_mesh
from h3lib.parallel.shard import SeqShard
from h3lib.simulate import canonical_values, play


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def _h3lib(*arguments) -> Done:
    """The command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
    return Done(ended.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A synthetic folder in the original layout, and its conversion."""
    root = tmp_path_factory.mktemp("folders")
    first, second = root / "original", root / "diffusers"
    synth = ("synth", first, "--size", "tiny", "--key-layout", "original", "--seed", "4")
    for asked in (
        (*synth, "--max-shard-bytes", "300000"),
        ("convert", first, second, "--key-layout", "diffusers"),
    ):
        done = _h3lib("checkpoint", *asked)
        assert done.returncode == 0 and done.stderr == "", done.stderr
    return first, second


def test_both_folders_hold_the_same_values(folders):
    listed = [_h3lib("checkpoint", "inspect", folder, "--digests").stdout for folder in folders]
    assert "original key layout, size tiny" in listed[0]
    assert "diffusers key layout, size tiny" in listed[1]
    values = [text.splitlines()[2:] for text in listed]
    assert values[0] == values[1] and len(values[0]) == len(parameters(TINY))
    source = SyntheticWeights(TINY, 4)
    expected = {name: digest(source.read(name)) for name in source.names}
    assert {line.split()[-1]: line.split()[0] for line in values[0]} == expected


def test_every_problem_is_a_line(folders, tmp_path):
    spoiled = tmp_path / "spoiled"
    shutil.copytree(folders[0], spoiled)
    shards = sorted(spoiled.glob("*.safetensors"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    config = json.loads((spoiled / "config.json").read_text())
    done = _h3lib("checkpoint", "inspect", spoiled)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert any("missing shard" in line for line in lines), lines
    assert any("truncated" in line for line in lines), lines
    (spoiled / "config.json").write_text(json.dumps(config | {"hidden_size": 97}))
    done = _h3lib("checkpoint", "inspect", spoiled)
    assert done.returncode == 2 and "hidden_size" in done.stderr
    done = _h3lib("checkpoint", "inspect", spoiled, "--size", "tiny")
    assert "config.json: hidden_size is 97, expected 96" in done.stderr
    assert "missing shard" in done.stderr


def test_refusals(folders, tmp_path):
    done = _h3lib("checkpoint", "convert", folders[0], folders[1], "--key-layout", "diffusers")
    assert done.returncode == 2 and "an empty folder" in done.stderr
    done = _h3lib("checkpoint", "inspect", tmp_path)
    assert done.returncode == 2 and "config.json in the folder, or --size" in done.stderr


@pytest.mark.parametrize("layout", ("tp4-cp2-sp", "tp2-pp2"))
def test_a_rank_reads_its_share_and_nothing_else(folders, layout, monkeypatch):
    """Every slice it asks for is kept, so no more than one is ever beside its share."""
    layout = Layout.parse(layout)
    owner, whole = Ownership.of(layout, 132, PUBLISHED), SyntheticWeights(TINY, 4)
    source, read = CheckpointWeights(folders[0], TINY), []
    for rank in range(layout.num_ranks):
        shard = SeqShard(owner, rank, local_mesh())
        asked = []
        with monkeypatch.context() as patch:
            inner = CheckpointWeights.read

            def counted(self, name, region=None, asked=asked, inner=inner):
                asked.append(math.prod(region_shape(region)))
                return inner(self, name, region)

            patch.setattr(CheckpointWeights, "read", counted)
            found = rank_weights(TINY, source, shard)
        assert sum(asked) == sum(weight.numel() for weight in found.values())
        assert found.keys() == stage_parameters(TINY, layout, shard.stage).keys()
        expected = rank_weights(TINY, whole, shard)
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
        read.append(sum(asked))
    assert max(read) < sum(math.prod(shape) for shape, _ in parameters(TINY).values())


def test_the_model_of_a_folder_has_the_bytes_of_its_values(folders):
    """The original key layout read in slices by four ranks, against the values themselves."""
    packed = packed_rows(33)
    canonical = canonical_values(ModelProgram(TINY, SyntheticWeights(TINY, 4), packed))
    found = ModelProgram(TINY, CheckpointWeights(folders[0], TINY), packed)
    assert red(play("tp2-sp-pp2", found, canonical)) == set()
