"""The block as a PyTorch module: checkpoint names, packed rows with padding, autograd."""

import pytest
import torch
from block_support import SMALL_BLOCKS, TINY, canonical, packed_rows, padded, permuted

from h3lib.contract import ContractError, OperandError, RowsError
from h3lib.model.block import BLOCK_PREFIX, Block, block_parameters
from h3lib.model.inputs import block_inputs, block_weights, time_embedding
from h3lib.model.module import H3Block, PackedRows
from h3lib.model.weights import SyntheticWeights, synthetic_rows
from h3lib.parallel.shard import SeqShard

SOURCE = SyntheticWeights(TINY, 1)


def _run(packed, x, dout, contract=SMALL_BLOCKS):
    block = H3Block(TINY, contract=contract)
    weights = {name: SOURCE.read(BLOCK_PREFIX + name) for name in block_parameters(TINY)}
    block.load_state_dict(weights)
    x = x.clone().requires_grad_()
    temb = time_embedding(TINY, SOURCE, packed.timestep).requires_grad_()
    rows = PackedRows(
        packed.position_ids, packed.token_tags, packed.timestep_indices, packed.logical_keys
    )
    out = block(x, temb, rows)
    out.backward(dout)
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, "temb": temb.grad, **gradients}


def _rows(num_rows):
    numbers = torch.arange(num_rows)
    return tuple(
        synthetic_rows(label, 1, numbers, TINY.hidden_size, torch.bfloat16) for label in "xd"
    )


def _bytes_equal(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


PACKED, (X, DOUT) = packed_rows(131), _rows(131)


def test_parameter_names_are_those_of_the_checkpoint():
    assert list(dict(H3Block(TINY).named_parameters())) == list(block_parameters(TINY))


def test_permuting_rows_with_their_metadata_changes_no_byte():
    plain = _run(PACKED, X, DOUT)
    order = torch.randperm(131, generator=torch.Generator().manual_seed(0))
    moved = _run(permuted(PACKED, order), X[order], DOUT[order])
    for name, value in plain.items():
        assert _bytes_equal(moved[name], value[order] if name in ("out", "dx") else value), name


@pytest.mark.parametrize("at", (0, 40, 131))
def test_padding_may_hold_nan_and_its_rows_come_back_as_zero(at):
    plain = _run(PACKED, X, DOUT)

    def insert(rows):
        return torch.cat((rows[:at], torch.full((9, rows.shape[1]), torch.nan).to(rows), rows[at:]))

    found = _run(padded(PACKED, at, 9), insert(X), insert(DOUT))
    for name, value in plain.items():
        got = found[name]
        if name in ("out", "dx"):
            pad = got[at : at + 9]
            assert _bytes_equal(pad, torch.zeros_like(pad)), name
            got = torch.cat((got[:at], got[at + 9 :]))
        assert _bytes_equal(got, value), name


def test_duplicate_keys_are_refused():
    keys = PACKED.logical_keys.clone()
    keys[7] = keys[8]
    rows = PackedRows(PACKED.position_ids, PACKED.token_tags, PACKED.timestep_indices, keys)
    with pytest.raises(RowsError, match=r"logical key of two active rows: received \(0, 8\)"):
        H3Block(TINY)(X, time_embedding(TINY, SOURCE, PACKED.timestep), rows)


def test_without_a_trace_the_bytes_are_those_of_the_traced_block():
    """Without a trace a rank that owns a whole tree rounds where it is finished."""
    size, packed = TINY, packed_rows(264)
    source, shard = SyntheticWeights(size, 0), SeqShard.canonical(264)
    given = block_inputs(size, source, packed, shard, seed=0)
    block = Block(size, shard, block_weights(size, source, shard))
    out = block.forward(given.x, given.temb, given.rows)
    found = block.backward(given.dout)
    traced = canonical(264)
    assert _bytes_equal(out, traced["output", "out"])
    gradients = {"dx": found.dx, "dtemb": found.dtemb, **found.parameters}
    for name, value in gradients.items():
        assert _bytes_equal(value, traced["gradient", name]), name


def test_rows_and_contract_must_be_those_of_the_shard():
    rows = PackedRows(PACKED.position_ids, PACKED.token_tags, PACKED.timestep_indices)
    temb = time_embedding(TINY, SOURCE, PACKED.timestep)
    with pytest.raises(RowsError, match="active rows: received 131; accepted: 64 as the shard"):
        H3Block(TINY, SeqShard.canonical(64))(X, temb, rows)
    with pytest.raises(ContractError, match="contract of the shard"):
        H3Block(TINY, SeqShard.canonical(131), SMALL_BLOCKS)


@pytest.mark.parametrize(
    "change, words",
    (
        ({"token_tags": 3}, "token tag: received 3; accepted: -1 to 2"),
        ({"timestep_indices": 2}, "timestep index: received 2; accepted: 0 to 1"),
        ({"timestep_indices": -1}, "timestep index: received -1; accepted: 0 to 1"),
    ),
)
def test_metadata_out_of_range_is_refused(change, words):
    fields = {name: getattr(PACKED, name).clone() for name in ("token_tags", "timestep_indices")}
    for name, value in change.items():
        fields[name][5] = value
    temb = time_embedding(TINY, SOURCE, PACKED.timestep)
    with pytest.raises(OperandError, match=words):
        H3Block(TINY)(X, temb, PackedRows(PACKED.position_ids, **fields))


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    block = H3Block(TINY)
    weights = {name: SOURCE.read(BLOCK_PREFIX + name) for name in block_parameters(TINY)}
    block.load_state_dict(weights)
    rows = PackedRows(PACKED.position_ids, PACKED.token_tags, PACKED.timestep_indices)
    out = block(X, time_embedding(TINY, SOURCE, PACKED.timestep), rows)
    with torch.no_grad():
        block.norm1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(DOUT)


def test_a_block_lets_go_of_what_its_forward_kept_and_refuses_a_second_backward():
    shard = SeqShard.canonical(131, SMALL_BLOCKS)
    given = block_inputs(TINY, SOURCE, PACKED, shard, seed=1)
    block = Block(TINY, shard, block_weights(TINY, SOURCE, shard))
    with pytest.raises(OperandError, match="backward of a block: received 'no forward before it'"):
        block.backward(given.dout)
    block.forward(given.x, given.temb, given.rows)
    first = block.backward(given.dout)
    kept = [
        value
        for part in (block, block.attention, block.feed_forward, block.norm1.norm, block.norm2.norm)
        for value in vars(part).values()
        if isinstance(value, torch.Tensor) and len(value) == 131 and value.is_floating_point()
    ]
    assert not kept and not block.ctx.gradients
    with pytest.raises(OperandError, match="no forward before it"):
        block.backward(given.dout)
    block.forward(given.x, given.temb, given.rows)
    again = block.backward(given.dout)
    for name, value in first.parameters.items():
        assert _bytes_equal(value, again.parameters[name]), name
