"""Bytes catch every mutant; what a tolerance lets through is what the committed file says."""

import json

import pytest
import torch

from h3lib.bench.mutants import MUTANTS, NO_FAULT
from h3lib.bench.tolerance import CHECKS, refusals
from h3lib.book import ROOT
from h3lib.canonical import canonical_tensors
from h3lib.contract import SIZES
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.program import BlockProgram
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.shard import SeqShard

ROWS = 264


@pytest.fixture(scope="module")
def program():
    size = SIZES["tiny"]
    return BlockProgram(size, SyntheticWeights(size, 0, "cpu"), pack(job_for_rows(ROWS)))


@pytest.fixture(scope="module")
def canonical(program):
    return canonical_tensors(program.records(SeqShard.canonical(ROWS)))


def test_bytes_catch_what_a_cosine_does_not(program, canonical):
    found = refusals(MUTANTS["BF16 partials"], program, canonical, "tp4")
    assert all(found["bytes"].values())
    assert not any(found["cosine 0.99"].values())


def test_no_check_refuses_a_layout_without_fault(program, canonical):
    found = refusals(MUTANTS[NO_FAULT], program, canonical, "tp2-cp2")
    assert not any(count for counts in found.values() for count in counts.values())


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_equal_values_zeros_too_and_refuses_opposite_ones(name):
    x = torch.randn(50, generator=torch.Generator().manual_seed(3)).bfloat16()
    zeros = torch.zeros(7)
    assert CHECKS[name](x, x.clone()) and CHECKS[name](zeros, zeros.clone())
    assert not CHECKS[name](-x, x)


def test_the_committed_file_has_every_mutant_and_check_and_bytes_catch_all():
    content = json.loads((ROOT / "reports" / "cpu" / "tolerance.json").read_text())
    assert content["complete"]
    cases = {(case["mutant"], case["check"]): case for case in content["cases"]}
    assert set(cases) == {(mutant, check) for mutant in MUTANTS for check in CHECKS}
    for mutant in MUTANTS:
        case = cases[mutant, "bytes"]
        assert (case["output"] + case["gradient"] > 0) == (mutant != NO_FAULT)
