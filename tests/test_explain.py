"""`h3lib explain` says of every op what runs and in which order, from the code itself."""

import pytest
import torch

from h3lib.cli import main
from h3lib.contract import BackendError
from h3lib.explain import POINTWISE, explain, kernel, ops, order, reasons


def test_every_op_is_there_once():
    names = set(ops())
    expected = {"linear_forward", "unit_tree_roots", "row_unit_product_roots", "attention_dkv"}
    assert expected <= names and len(names) >= 25


def test_orders_are_those_of_the_docstrings():
    every = ops()
    assert order(every["linear_forward"]) == "chain over K, then the bias."
    assert order(every["attention_dq"]) == "one chain over all keys, ascending."
    assert "online softmax over key blocks" in order(every["attention_forward"])
    assert order(every["swiglu_forward"]) == POINTWISE
    sums = ("row_unit_roots", "row_fold_roots", "unit_tree_roots", "rms_norm_forward")
    assert all(order(every[name]) != POINTWISE for name in sums)


def test_kernels_are_named_by_where_they_are():
    assert kernel(ops()["linear_forward"], "eager") == "gemm.linear_forward"
    why = reasons()
    absent = why["triton"].startswith("not here: back end")
    expected = "none" if absent else "hopper.gemm_chain.linear_forward_hopper"
    assert kernel(ops()["linear_forward"], "triton") == expected


def test_a_machine_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert reasons()["eager"].startswith("runs on cpu")
    assert reasons()["triton"].startswith("not here: ")


def test_one_op_and_a_wrong_one(capsys):
    lines = list(explain("rms_norm_forward"))
    assert any("in-row tree" in line for line in lines)
    with pytest.raises(BackendError, match="received 'gemm'"):
        list(explain("gemm"))
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--op", "gemm"])
    assert ended.value.code == 2 and "accepted: " in capsys.readouterr().err
