"""Findings of bits: what passes, what cannot, and a check that raises."""

import torch

from h3lib.bench.findings import Finding, found, run_checks

ONE, OTHER = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])


def test_bytes_are_compared_and_a_control_must_differ():
    assert found("check", "same", ONE, ONE.clone()).passed
    assert not found("check", "sign of zero", ONE, OTHER).passed
    assert found("check", "mutant", ONE, OTHER, equal=False).passed
    assert not found("check", "mutant unseen", ONE, ONE, equal=False).passed
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert found("check", "payload of NaN", nan, nan.flip(0)).passed


def test_another_shape_or_dtype_never_passes():
    for value in (ONE[:1], ONE.double(), ONE[None]):
        for equal in (True, False):
            finding = found("check", "case", value, ONE, equal)
            assert finding.different == -1 and not finding.passed
            assert not finding.compare(ONE, ONE).passed


def test_nothing_compared_is_no_pass_and_a_raise_is_a_finding():
    assert not Finding("check", "nothing").passed

    def raises():
        yield Finding("check", "first", 1)
        raise RuntimeError("no GPU")

    first, second = run_checks({"raises": raises})
    assert first.passed and not second.passed and "no GPU" in second.details["error"]
