"""Interference needs a GPU for each rank; what it changes and reads can be seen without."""

import types

import pytest
import torch

from h3lib.bench import interference
from h3lib.bench.interference import NCCL, OURS, relate


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


def test_slowdowns_are_over_the_default_alone_and_losses_over_those_beside_nccl():
    same = {"product": "one wave", "product_way": "cuBLAS", "collective": "all_reduce",
            "product_alone_us": 100.0, "left_free": 0, "high_priority": False}  # fmt: skip

    def line(way, programs, product, alone, beside):
        return {**same, "collective_way": way, "programs": programs, "product_beside_us": product,
                "collective_alone_us": alone, "collective_beside_us": beside}  # fmt: skip

    lines = [line(NCCL, None, 140.0, 50.0, 75.0), line(OURS, None, 110.0, 60.0, 90.0),
             line(OURS, 8, 105.0, 80.0, 120.0)]  # fmt: skip
    relate(lines)
    assert [x["of_nccl"] for x in lines] == [1, pytest.approx(0.25), pytest.approx(0.125)]
    assert [x["collective_slowdown"] for x in lines] == [1.5, 1.5, 2.0]
    assert lines[2]["gain"] == pytest.approx(1 / 1.05 + 1 / 2)
    lines.append({**lines[1], "left_free": 16, "product_alone_us": 120.0})
    relate(lines)
    assert lines[3]["product_slowdown"] == pytest.approx(1.1), "over all multiprocessors"
    lines[0]["product_beside_us"] = 100.0
    relate(lines)
    assert {x["of_nccl"] for x in lines} == {None}
