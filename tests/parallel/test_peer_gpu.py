"""The peer tree and its protocol on a GPU; eight ranks share it if there is one."""

import json

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("allocator", ("", "expandable_segments:True"))
def test_bits_of_every_world_and_hierarchy(tmp_path, monkeypatch, allocator):
    from h3lib.bench.collectives_bits import run_bits

    if allocator:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    out = tmp_path / "bits.json"
    run_bits(out, "test", quick=True, ranks=[1, 2, 3, 4, 8], timeout_s=120)
    report = json.loads(out.read_text())
    assert report["complete"] and len(report["findings"]) > 100
    assert [f for f in report["findings"] if not f["passed"]] == []


def test_litmus_tests_pass_and_broken_variants_fail():
    from h3lib.bench.litmus import NONE, SOME, run_all

    found = list(run_all(rounds=20_000, abort_rounds=500))
    assert [litmus for litmus in found if not litmus.passed] == []
    assert {litmus.expected for litmus in found} >= {NONE, SOME}


def test_random_faults(tmp_path):
    from h3lib.faults.injection import run_faults

    assert run_faults(24, 11, tmp_path / "faults.json", device="cuda") == 0


def test_open_close_rounds_leave_nothing():
    from h3lib.faults.rounds import leaks, run_rounds

    assert leaks(run_rounds(100, "cuda")) == []


def test_a_handle_of_freed_memory_and_too_large_a_buffer_are_typed_errors():
    from h3lib.contract import PeerError
    from h3lib.parallel.peer_memory import CudaDriver, DriverError, SharedBuffers

    class Alone:
        rank, size, ranks = 0, 1, (0,)

        def hold(self):
            return None

        def gather_objects(self, value):
            return [value]

    driver = CudaDriver()
    address = driver.allocate(2 << 20)
    handle = driver.export(address)
    driver.free(address)
    with pytest.raises(DriverError, match="cuIpcOpenMemHandle_v2: received 'CUDA_ERROR"):
        driver.open(handle)
    with pytest.raises(PeerError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        SharedBuffers(Alone(), 1 << 45, driver)
