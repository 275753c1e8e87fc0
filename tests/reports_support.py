"""Reports of layouts on several GPUs with made-up numbers, for pages that show such files."""

from h3lib.contract import PUBLISHED
from h3lib.prices import PASS, ROWS

PLACE = {
    "environment": {
        "gpu": "a GPU", "driver": "1", "torch": "2", "triton": "3", "commit": "c" * 40,
        "date": "2026-12-01T00:00:00+00:00",
    },
    "contract": PUBLISHED.id,
    "complete": True,
}  # fmt: skip
EAGER, COMPILED = "diffusers eager, NCCL", "diffusers torch.compile, NCCL"


def layouts() -> dict:
    """As `h3lib bench layouts` writes on two GPUs."""
    lines, memory, bits, agreement = [], [], [], []
    for layout, ranks in (("tp1", 1), ("tp2", 2), ("cp2", 2)):
        for rows, graph in ((264, False), (264, True), (ROWS, False)):
            named = {"layout": layout, "ranks": ranks, "rows": rows}
            for op in ("forward", PASS):
                for against in (EAGER, COMPILED) if rows == ROWS else (EAGER,):
                    times = {"ours_ms": 6.0, "exposed_ms": 1.0, "hidden_ms": 1.0, "theirs_ms": 5.0}
                    times |= {"theirs_exposed_ms": 0.5} if against == EAGER else {}
                    lines.append({**named, "op": op, "graph": graph, "status": "run",
                                  "against": against, "price": 1.2, **times})  # fmt: skip
            bits.append({**named, "graph": graph, "elements": 1234, "passed": True})
            agreement.append({**named, "worst": "to_q.weight", "worst_value": 0.01})
            for measured in ("one rank alone", "in the layout"):
                sizes = {"weight_bytes": 10**9, "saved_bytes": 10**9, "peak_bytes": 2 * 10**9}
                memory.append({**named, "measured": measured, "theirs_peak_bytes": 10**9, **sizes})
    lines.append({"layout": "tp8", "ranks": 8, "rows": ROWS, "status": "not run: one reason"})
    lists = {"measurements": lines, "memory": memory, "bits": bits, "agreement": agreement}
    return {**PLACE, "gpus": 2, **lists}


def overlap() -> dict:
    """As `h3lib bench overlap` writes."""
    line = {
        "op": "block forward", "case": "tp2", "rows": ROWS, "graph": False, "ours_us": 1000.0,
        "theirs_us": 1100.0, "exposed_us": 100.0, "exposed_without_us": 200.0, "reduction": 0.5,
    }  # fmt: skip
    return {**PLACE, "measurements": [line], "bits": [{"passed": True}]}


def transformer() -> dict:
    """As `python -m h3lib.bench.transformer --layout tp2` writes."""
    bits = {"elements": 4321, "different": 0, "ranks_equal": 2, "ranks": 2}
    side = {"ms": 1000.0, "peak_bytes": 10**9}
    lines = [
        {"op": "forward", "rows": rows, "ours": side, "theirs": side, "ratio": 1.0, "bits": bits}
        for rows in (264, ROWS)
    ]
    return {**PLACE, "layout": "tp2", "weight_bytes": 10**9, "measurements": lines}


def interference() -> dict:
    """As `h3lib bench interference` writes."""
    products = (("one wave", "cuBLAS", 0), ("one wave", "h3lib", 0), ("many waves", "h3lib", 24))
    collectives = [
        {"collective": "reduce_scatter_rows to BF16", "collective_way": way, "programs": programs,
         "high_priority": first}
        for way, programs, first in (
            ("peer tree", None, False), ("peer tree", 16, True), ("NCCL FP32", None, False),
        )
    ]  # fmt: skip
    kernels = [
        {"kernel": "k", "programs": 99, "threads": 512, "multiprocessors": 99, "us": 10.0}
    ]
    found = {"product_slowdown": 1.5, "collective_slowdown": 2.0, "gain": 7 / 6, "of_nccl": None}
    named = [dict(zip(("product", "product_way", "left_free"), p, strict=True)) for p in products]
    shapes = {"one wave": [8, 8, 8], "many waves": [8, 8, 8], "roots": [8, 8]}
    return {
        **PLACE, "ranks": 2, "nvls": "off", "shapes": shapes,
        "measurements": [{**product, **c, **found} for product in named for c in collectives],
        "launches": [{**work, "kernels": kernels} for work in (*named, *collectives)],
    }  # fmt: skip
