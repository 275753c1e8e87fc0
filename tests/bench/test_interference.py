"""Interference needs a GPU for each rank; what it changes and reads can be seen without."""

import types

import pytest
import torch

from h3lib.bench import interference
from h3lib.bench.interference import NCCL, OURS, beside_nccl, limited
from h3lib.parallel import peer_steps


def test_a_limit_of_programs_holds_inside_and_is_undone_after_an_error():
    before = peer_steps.MAX_PROGRAMS, peer_steps.STAGE_PROGRAMS
    with limited(None):
        assert (peer_steps.MAX_PROGRAMS, peer_steps.STAGE_PROGRAMS) == before
    with pytest.raises(KeyError), limited(8):
        assert peer_steps.MAX_PROGRAMS == peer_steps.STAGE_PROGRAMS == 8
        raise KeyError
    assert (peer_steps.MAX_PROGRAMS, peer_steps.STAGE_PROGRAMS) == before


def test_a_launch_is_on_no_more_multiprocessors_than_it_has_programs(monkeypatch):
    gpu = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    event = {"name": "void kernel<int>(int)", "dur": 3.5, "args": {"grid": [64, 2, 1],
             "block": [256, 1, 1]}}  # fmt: skip
    found = interference._launch(event)
    assert found == {"kernel": "void kernel", "programs": 128, "threads": 256,
                     "multiprocessors": 128, "us": 3.5}  # fmt: skip
    event["args"]["grid"] = [528, 1, 1]
    assert interference._launch(event)["multiprocessors"] == 132


def test_what_is_lost_is_measured_by_what_is_lost_beside_nccl():
    same = {"product": "one wave", "product_way": "cuBLAS", "collective": "all_reduce"}
    lines = [
        {**same, "collective_way": NCCL, "programs": None, "product_slowdown": 1.4},
        {**same, "collective_way": NCCL, "programs": 4, "product_slowdown": 1.2},
        {**same, "collective_way": OURS, "programs": None, "product_slowdown": 1.1},
    ]
    beside_nccl(lines)
    assert [line["of_nccl"] for line in lines] == [1, pytest.approx(0.5), pytest.approx(0.25)]
    lines[0]["product_slowdown"] = 1.0
    beside_nccl(lines)
    assert {line["of_nccl"] for line in lines} == {None}
