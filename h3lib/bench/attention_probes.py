"""What the attention kernels add in which order, special values, and their error against FP64.

Order probes. With q = 0 every p is 1, so out, dq, dk, dv are plain sums of rows of v, k, q, dO, and
128 channels hold 128 probes at once: 2^24, 1 and -2^24 in three rows of which no two share a step
of 16. FP32 keeps the 1 only if nothing large was in the accumulator when it came, so the sum tells
the order. Expected: ascending. The mutants are orders that someone could build instead: descending,
two halves added, a ring that starts at a middle shard; each must be told from the kernel's.

Errors are norms relative to the FP64 reference, next to the library's on the same operands. Bound:
p (or dS) and the result are each rounded to bf16, 2^-9 at most: 2^-8 together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from h3lib.bench.attention_invariance import CONTRACT, Whole, draw
from h3lib.bench.findings import Finding
from h3lib.ops.attention import attention_delta, attention_dkv, attention_dq, attention_forward
from h3lib.ops.hopper.attention_tiles import COLUMN, ROW, divide
from h3lib.ops.hopper.compat import gl, gluon

BIG = 2.0**24
STEP = 16  # rows that one MMA instruction reduces: their inner order is the hardware's
ROUNDING_BOUND = 2.0**-8
NAMES = ("out", "lse", "dq", "dk", "dv")


def probe_rows(rows: int, seed: int) -> Tensor:
    """`[rows, 128]` FP32: in each channel 2^24, 1, -2^24 at three random steps, in a pattern."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(rows, 128)
    for channel in range(128):
        steps = torch.randperm(rows // STEP, generator=generator)[:3].sort().values
        offsets = torch.randint(0, STEP, (3,), generator=generator)
        pattern = ((BIG, 1.0, -BIG), (BIG, -BIG, 1.0), (1.0, BIG, -BIG))[channel % 3]
        x[steps * STEP + offsets, channel] = torch.tensor(pattern)
    return x


def summed(x: Tensor) -> Tensor:
    """The rows of x added in FP32, one after another."""
    total = torch.zeros(x.shape[1])
    for row in x:
        total = total + row
    return total


def orders(x: Tensor) -> dict[str, Tensor]:
    """The sum in the contract's order, and in three others."""
    half = len(x) // 2
    third = len(x) // 3
    return {
        "ascending": summed(x),
        "descending": summed(x.flip(0)),
        "halves": summed(x[:half]) + summed(x[half:]),
        "ring": summed(x.roll(-third, 0)),
    }


def check_order(rows: int = 1000) -> Iterator[Finding]:
    """out over keys; dq over keys; dk, dv over queries."""
    zero = torch.zeros((rows, 1, 128), device="cuda", dtype=torch.bfloat16)
    probes = {name: probe_rows(rows, seed) for seed, name in enumerate(("out", "dq", "dk", "dv"))}
    x = {name: p.to("cuda", torch.bfloat16)[:, None] for name, p in probes.items()}
    lse = torch.zeros((rows, 1), device="cuda")
    minus_one = torch.full_like(lse, -1.0)  # dS = p (dP - delta) = 1
    out, _ = attention_forward(zero, zero, x["out"], CONTRACT, backend="triton")
    sums = {"out": out[0, 0]}
    statistics = (lse, minus_one, CONTRACT)
    sums["dq"] = attention_dq(zero, x["dq"], zero, zero, *statistics, backend="triton")[0, 0]
    dk, dv = attention_dkv(x["dk"], zero, zero, x["dv"], *statistics, backend="triton")
    sums |= {"dk": dk[0, 0], "dv": dv[0, 0]}
    scale = {"out": torch.tensor(rows).float(), "dv": torch.tensor(1.0)}
    for name, value in sums.items():
        for order, total in orders(probes[name]).items():
            if name in scale:
                wanted = total / scale[name]
            else:
                wanted = total * (torch.tensor(1.0).double() / math.sqrt(128)).float()
            expected = "equal" if order == "ascending" else "different"
            finding = Finding(f"order of {name}", f"T={rows} {order}", expected=expected)
            yield finding.compare(value.cpu(), wanted.to(torch.bfloat16))
    yield from _merge_control(rows)


def _merge_control(rows: int) -> Iterator[Finding]:
    """Two halves of the keys, each by itself, merged by their L: not the contract's bits."""
    whole = draw(rows, 2)
    half = rows // 2
    parts = [
        attention_forward(whole.q, whole.k[s], whole.v[s], CONTRACT, backend="triton")
        for s in (slice(0, half), slice(half, rows))
    ]
    lse = torch.logaddexp2(parts[0][1], parts[1][1])
    finding = Finding("control: two halves merged", f"T={rows} L", expected="different")
    yield finding.compare(lse, whole.lse)


@gluon.jit
def _divide_kernel(a, b, quotient):
    row = gl.arange(0, 64, ROW)
    at = gl.program_id(0) * 8192 + row[:, None] * 128 + gl.arange(0, 128, COLUMN)[None, :]
    gl.store(quotient + at, divide(gl.load(a + at), gl.load(b + gl.program_id(0) * 64 + row)))


def check_division(tiles: int = 4096) -> Iterator[Finding]:
    """out's division, 33 million quotients: the bytes of torch's IEEE division."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (tiles * 64, 128)
    a = torch.randn(shape, device="cuda", generator=generator)
    a *= torch.exp2(torch.randint(-90, 90, shape, device="cuda", generator=generator).float())
    a[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    b = torch.exp2(16 * torch.rand(len(a), device="cuda", generator=generator))
    b[::7] = b[::7].round()
    quotient = torch.full_like(a, 7.0)
    _divide_kernel[(tiles,)](a, b, quotient, num_warps=4, enable_fp_fusion=False)
    finding = Finding("division to nearest", f"{tiles} tiles")
    yield finding.compare(quotient, a / b[:, None])


def _class(x: Tensor) -> Tensor:
    """0 finite, 1 and -1 infinite, 2 NaN, as FP32."""
    x = x.float().cpu()
    infinite = torch.where(x.isinf(), x.sign(), torch.zeros_like(x))
    return torch.where(x.isnan(), torch.full_like(x, 2.0), infinite)


def _eager(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    q, k, v, dout = (x.cpu() for x in (q, k, v, dout))
    out, lse = attention_forward(q, k, v, CONTRACT)
    delta = attention_delta(dout, out)
    operands = (q, k, v, dout, lse, delta, CONTRACT)
    return out, lse, delta, attention_dq(*operands), *attention_dkv(*operands)


def check_values(rows: int = 200) -> Iterator[Finding]:
    """Where NaN and infinity go is where the eager op sends them; -0.0; subnormals; outliers."""
    for name in ("q", "k", "v", "dout"):
        for value in (math.nan, math.inf, -math.inf, 3e38 if name in ("v", "dout") else 1e6):
            for row in (3, rows - 1):
                whole = draw(rows, 1)
                x = [getattr(whole, n).clone() for n in ("q", "k", "v", "dout")]
                x[("q", "k", "v", "dout").index(name)][row, 0, 5] = value
                finding = Finding("NaN and infinity", f"{name}[{row}, 5] = {value}")
                for ours, eager in zip(Whole(*x).results(), _eager(*x), strict=True):
                    finding.compare(_class(ours), _class(eager))
                yield finding
    whole = draw(rows, 1)
    minus_zero = torch.full_like(whole.v, -0.0).contiguous()
    result = Whole(whole.q, whole.k, minus_zero, minus_zero)
    finding = Finding("sums of -0.0 are +0.0", f"T={rows}")
    for value in (result.out, result.dv):
        finding.compare(value, torch.zeros_like(value))
    yield finding
    tiny = (whole.v.float() * 2.0**-128).to(torch.bfloat16)
    result = Whole(whole.q, whole.k, tiny, whole.dout)
    scaled = attention_forward(whole.q, whole.k, tiny.double().mul(2.0**100).bfloat16(), CONTRACT,
                               backend="triton")[0].double() / 2.0**100  # fmt: skip
    worst = ((result.out.double() - scaled).abs().max() / 2.0**-133).item()
    details = {"worst difference in smallest subnormals": worst}
    yield Finding("subnormal v", f"T={rows}", 1, int(not worst <= 1.0), details=details)


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, chunk: int = 4096) -> list[Tensor]:
    """out, L, dq, dk, dv in FP64, head by head, queries in chunks."""
    results = []
    for head in range(q.shape[1]):
        q_h, k_h, v_h, do_h = (x[:, head].double() for x in (q, k, v, dout))
        out, lse, dq = torch.empty_like(q_h), torch.empty_like(q_h[:, :1]), torch.empty_like(q_h)
        dk, dv = torch.zeros_like(k_h), torch.zeros_like(v_h)
        for start in range(0, len(q_h), chunk):
            b = slice(start, start + chunk)
            s = (q_h[b] @ k_h.T).mul_(1 / math.sqrt(128))
            lse[b] = torch.logsumexp(s, 1, keepdim=True)
            p = s.sub_(lse[b]).exp_()
            out[b] = p @ v_h
            dv += p.T @ do_h[b]
            ds = (do_h[b] @ v_h.T).sub_((do_h[b] * out[b]).sum(1, keepdim=True)).mul_(p)
            dq[b] = ds @ k_h / math.sqrt(128)
            dk += ds.T @ q_h[b] / math.sqrt(128)
        results.append((out, lse[:, 0] / math.log(2), dq, dk, dv))
    return [torch.stack(x, 1) for x in zip(*results, strict=True)]


def cudnn(whole: Whole) -> list[Tensor]:
    """out, dq, dk, dv of the library."""
    leaves = [
        x.transpose(0, 1).contiguous()[None].requires_grad_() for x in (whole.q, whole.k, whole.v)
    ]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(*leaves)
    gradients = torch.autograd.grad(out, leaves, whole.dout.transpose(0, 1).contiguous()[None])
    return [x.detach()[0].transpose(0, 1) for x in (out, *gradients)]


def relative_error(x: Tensor, wanted: Tensor, floor: Tensor) -> float:
    """At T = 1 dq and dk are zero, so a norm is not taken below 2^-8 of the operand's."""
    scale = max(wanted.norm().item(), ROUNDING_BOUND * floor.double().norm().item())
    return (x.double() - wanted).norm().item() / scale


def errors(whole: Whole) -> dict[str, float]:
    """Ours and the library's, relative to FP64; L absolute, relative to max(1, |L|)."""
    wanted = dict(zip(NAMES, reference(whole.q, whole.k, whole.v, whole.dout), strict=True))
    floors = {"out": whole.v, "dq": whole.k, "dk": whole.q, "dv": whole.dout}
    found = {
        name: relative_error(getattr(whole, name), wanted[name], floor)
        for name, floor in floors.items()
    }
    if len(whole.q) > 1:  # the library refuses one key
        for (name, floor), x in zip(floors.items(), cudnn(whole), strict=True):
            found[f"{name} cudnn"] = relative_error(x, wanted[name], floor)
    lse = wanted["lse"]
    found["lse"] = ((whole.lse.double() - lse).abs() / lse.abs().clamp(min=1)).max().item()
    return found


def check_accuracy(rows: int, heads: int) -> Iterator[Finding]:
    """Random operands within the bound; outliers in the hundreds no worse than the library."""
    found = errors(draw(rows, heads, seed=1))
    over = [n for n in ("out", "dq", "dk", "dv") if not found[n] <= ROUNDING_BOUND]
    over += ["lse"] if not found["lse"] <= 2.0**-20 else []
    yield Finding("error against FP64", f"T={rows} N={heads}", 5, len(over), details=found)
    if rows in (264, 1097, 4097):
        whole = draw(rows, heads, seed=2)
        q, k, v, dout = (x.clone() for x in (whole.q, whole.k, whole.v, whole.dout))
        q[:, :, 3] *= 200
        k[:, :, 3] *= 2
        v[::37] *= 300
        dout[::41] *= 300
        found = errors(Whole(q, k, v, dout))
        over = [
            n for n in ("out", "dq", "dk", "dv")
            if not found[n] <= max(ROUNDING_BOUND, 1.25 * found[f"{n} cudnn"])
        ]  # fmt: skip
        yield Finding("error, outliers", f"T={rows} N={heads}", 4, len(over), details=found)
