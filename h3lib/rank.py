"""One rank of a run: compute a program in a layout, compare it with the canonical values.

Started by `h3lib run`, or directly under torchrun or srun. The first rank of every machine runs the
program alone and leaves its values in a temporary folder there; every rank compares every value of
its own with them. Rank 0 writes the report.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch

from h3lib.canonical import CanonicalFile, canonical_file
from h3lib.compare import Difference, compare_record, count, summarise
from h3lib.contract import PUBLISHED, H3Error, LayoutError, PeerError, ReportError
from h3lib.layout import Ownership
from h3lib.model.generation import first_different_step
from h3lib.model.program import BlockProgram, Program
from h3lib.model.trace import Record
from h3lib.model.weights import digest, digests
from h3lib.parallel.control import CONTROL_KIND, RingControl, control_axes
from h3lib.parallel.gloo import require_same
from h3lib.parallel.launch import die_with_launcher
from h3lib.parallel.levels import join
from h3lib.parallel.mesh import build_mesh
from h3lib.parallel.overlap import Chunks
from h3lib.parallel.place import RankPlace, check_nodes, own_place
from h3lib.parallel.shard import SeqShard
from h3lib.report import (
    PHASES,
    SCHEMA_VERSION,
    digest_of,
    digest_of_weights,
    environment,
    fingerprint,
    machine_names,
    write_report,
)
from h3lib.request import Request

EQUAL, DIFFERENT, REFUSED, FAILED = 0, 1, 2, 3


class RankRun:
    """The phases of a run on one rank, each timed; every rank goes through all of them."""

    def __init__(
        self,
        request: Request,
        place: RankPlace,
        progress: Callable[[str], None] = lambda phase: None,
    ):
        self.request, self.place, self.progress = request, place, progress
        self.layout, self.contract = request.parsed_layout, PUBLISHED
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.started = self.phase_started = time.monotonic()
        self.phase = "start"

    def run(self) -> int:
        """EQUAL or DIFFERENT. **Raises:** an H3Error for everything else."""
        self.progress(self.phase)
        if self.place.num_ranks != self.layout.num_ranks:
            accepted = f"{self.layout.num_ranks} for {self.layout.name}"
            raise LayoutError("number of ranks", self.place.num_ranks, accepted)
        request, on_gpu = self.request, self.request.device == "cuda"
        self.world, self.levels = join(
            self.layout, request.timeout_s, request.chosen_transport, on_gpu
        )
        try:
            self._join()
            self._phase("canonical")
            canonical = self._canonical()
            records = self._records(self.shard, self.program)
            self._phase("compare")
            differences = _compare(records, canonical)
            del records
            untraced = _compare(self.program.untraced(self.shard), canonical)
            self._phase("control")
            control = self._control(canonical)
            return self._report(canonical, differences, untraced, control)
        except BaseException as error:
            self.world.fail_alone(error)
            raise
        finally:
            self.levels.close()

    def _phase(self, name: str) -> None:
        """End the running phase and start the next."""
        now = time.monotonic()
        before = self.seconds.get(self.phase, 0.0)
        self.seconds[self.phase] = before + now - self.phase_started
        self.phase, self.phase_started = name, now
        self.progress(name)

    def _join(self) -> None:
        """Device, peers that agree, place in the layout, inputs."""
        request, rank = self.request, self.world.rank
        self.hosts = self.world.members.hosts
        self.nodes = self.world.gather_objects(self.place.node)
        check_nodes(self.layout, self.nodes, request.chosen_transport)
        self.device = request.device
        self.environment = environment(request.device, machine_names(self.hosts)[rank])
        software = fingerprint(self.environment)
        asked = {key: value for key, value in asdict(request).items() if key != "out"}
        asked["contract"] = self.contract.id
        require_same(self.world, {**asked, **software})
        # what one process does not ask
        alone = ("layout", "local_size", "timeout_s", "canonical", "recompute", "transport")
        alone += ("chunk_rows",)
        self.question = software | {k: v for k, v in asked.items() if k not in alone}
        self.program = request.program(self.device)
        self.packed = self.program.packed
        owner = Ownership.of(self.layout, self.packed.num_rows, self.contract)
        mesh = build_mesh(self.layout, rank, self.levels, Chunks(request.chunk_rows))
        self.shard = SeqShard(owner, rank, mesh)

    def _records(
        self, shard: SeqShard, program: Program, backward: bool = True
    ) -> list[Record]:
        """Every value at a place; timed, all ranks in step, at this rank's own."""
        step = self._step if shard is self.shard else lambda phase: None
        records = program.records(shard, backward, step)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return records

    def _step(self, phase: str) -> None:
        """Start a timed phase when every rank is there."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.world.gather_objects(None)
        self._phase(phase)

    def _canonical(self) -> CanonicalFile:
        """Computed by the first rank of each machine, read by all ranks of that machine.

        The file is removed as soon as all have it open, or kept for the next run that asks the
        same question (`Request.canonical`).
        """
        first = self.hosts.index(self.hosts[self.world.rank])
        folder, path, failure, reused = None, None, None, False
        if self.world.rank == first:
            try:
                folder = Path(self.request.canonical or tempfile.mkdtemp(prefix="h3lib-"))
                shard = SeqShard.canonical(self.packed.num_rows, self.contract)
                program = self.request.program(self.device, canonical=True)
                question = self.question | (self.digests if self.request.canonical else {})
                path, reused = canonical_file(
                    folder, question, lambda: self._records(shard, program)
                )
            except Exception as error:  # every rank must hear of it, or the others wait
                failure = f"{type(error).__name__}: {error}"
        try:
            answers = self.world.gather_objects((path, failure, reused))
            for rank, (_, reason, _) in enumerate(answers):
                if reason is not None:
                    raise PeerError(f"canonical run on rank {rank}", reason, "a run that ends")
            canonical = CanonicalFile(answers[first][0])
            self.canonical_reused = any(answer[2] for answer in answers)
            self.world.gather_objects(None)
        finally:
            if folder is not None and self.request.canonical is None:
                shutil.rmtree(folder, ignore_errors=True)
        return canonical

    def _control(self, canonical: CanonicalFile) -> dict:
        """The same run with a ring's order on one axis at a time must differ (contract, 7)."""
        layout, rank, axes = self.layout, self.world.rank, []
        groups = {"tp": layout.tp_group(rank), "cp": layout.cp_group(rank)}
        keys = self.program.control_keys()
        for axis, key in control_axes(self.shard.owner, keys).items():
            ring = RingControl(self.world.connect(tuple(groups[axis]), rank))
            shard = replace(self.shard, mesh=replace(self.shard.mesh, **{axis: ring}))
            records = self._records(shard, self.program, backward=axis == "cp")
            found = [compare_record(r, canonical[key]) for r in records if (r.kind, r.name) == key]
            counts = self.world.gather_objects([(d.total, d.different) for d in found])
            total, different = map(
                sum, zip(*(pair for rank_pairs in counts for pair in rank_pairs), strict=True)
            )
            axes.append({"axis": axis, "tensor": key[1], "total": total, "different": different})
        return {
            "kind": CONTROL_KIND,
            "applicable": bool(axes),
            "total": sum(axis["total"] for axis in axes),
            "different": sum(axis["different"] for axis in axes),
            "axes": axes,
        }

    def _report(
        self,
        canonical: CanonicalFile,
        differences: list[Difference],
        untraced: list[Difference],
        control: dict,
    ) -> int:
        """Rank 0 writes the report; every rank returns the same verdict."""
        self._phase("total")
        self.seconds["total"] = time.monotonic() - self.started
        ranks = self.world.gather_objects(differences)
        seconds = self.world.gather_objects(self.seconds)
        again = count(self.world.gather_objects(untraced))
        found = {
            "equal": not count(ranks)["different"] + again["different"],
            "untraced": again,
            "control": control,
            "timings_s": {phase: round(max(s[phase] for s in seconds), 6) for phase in seconds[0]},
        }
        failure = None
        if self.world.rank == 0:
            try:
                write_report(self._content(canonical, ranks, found), self.request.out)
            except (H3Error, OSError) as error:
                failure = str(error)
        failure = self.world.gather_objects(failure)[0]
        if failure is not None:
            raise ReportError("report", failure, "a valid report that can be written")
        return EQUAL if found["equal"] else DIFFERENT

    def _content(
        self, canonical: CanonicalFile, ranks: list[list[Difference]], found: dict
    ) -> dict:
        request, layout = self.request, self.layout
        tensors = summarise(canonical, canonical.digests, ranks, layout.pp)
        return {
            "schema": SCHEMA_VERSION,
            "contract": self.contract.id,
            "layout": layout.name,
            "num_ranks": layout.num_ranks,
            "local_size": layout.local_size or layout.num_ranks,
            "nodes": self.nodes,
            "ranks_per_gpu": self.levels.ranks_per_gpu(),
            "size": request.size,
            "rows": self.packed.num_rows,
            "blocks": request.num_blocks,
            "recompute": request.recompute,
            "chunk_rows": request.chunk_rows,
            **self._generation(tensors),
            "job": {"name": request.parsed_job.name, **asdict(request.parsed_job)},
            "weights": request.weights if request.is_synthetic else "checkpoint",
            "seed": request.seed,
            "device": request.device,
            "backend": request.backend,
            "transports": self.levels.used(),
            "environment": self.environment,
            **self.digests,
            "tensors": tensors,
            **found,
            "canonical_reused": self.canonical_reused,
            "complete": True,
        }

    def _generation(self, tensors: list[dict]) -> dict:
        """Grid points, and the first step that differs, of a generation; nothing for other runs."""
        if self.request.points is None:
            return {}
        first = first_different_step(tensors)
        return {"points": self.request.points, "first_different_step": first}

    @cached_property
    def digests(self) -> dict:
        """SHA-256 over the digests of all weights, by name, and of all inputs; those of each weight
        where there are more than one block's."""
        weights, inputs = self.program.given()
        by_name = digests(weights)
        whole = {"weights": digest_of_weights(by_name), "inputs": digest_of(map(digest, inputs))}
        if isinstance(self.program, BlockProgram):
            return {"digests": whole}
        return {"digests": whole, "weight_digests": by_name}


def _compare(records: list[Record], canonical: CanonicalFile) -> list[Difference]:
    return [compare_record(record, canonical[record.kind, record.name]) for record in records]


def run_rank(
    request: Request, place: RankPlace, progress: Callable[[str], None] = lambda phase: None
) -> int:
    """Run this rank to its status; an error is one line on stderr, a traceback if unforeseen."""
    watchdog = threading.Timer(request.timeout_s, _late, [request.timeout_s, place.rank])
    watchdog.daemon = True
    watchdog.start()
    try:
        if place.rank == 0:
            request.remove_old_report()
        request.check()
        return RankRun(request, place, progress).run()
    except (PeerError, ReportError) as error:
        status, message = FAILED, str(error)
    except H3Error as error:
        status, message = REFUSED, str(error)
    except Exception as error:
        short = isinstance(error, MemoryError | torch.OutOfMemoryError)
        short = short or "can't allocate memory" in str(error)  # what the CPU allocator says
        status, message = FAILED, f"out of memory: {error}" if short else traceback.format_exc()
    print(f"h3lib: rank {place.rank}: {message}", file=sys.stderr, flush=True)
    return status


def _late(timeout_s: float, rank: int) -> None:
    print(f"h3lib: rank {rank}: no end after {timeout_s:g} s", file=sys.stderr, flush=True)
    os._exit(FAILED)


def main() -> None:
    """`python -m h3lib.rank REQUEST_JSON [SCRATCH]`: a rank started by `h3lib run`.

    srun passes the status on. torchrun tells only success from failure: there the status goes to a
    file in SCRATCH.
    """
    request, place = Request(**json.loads(sys.argv[1])), own_place(alone=True)
    if place.launcher == "srun":
        status = run_rank(request, place)
        sys.stdout.flush()
        os._exit(status)
    die_with_launcher()
    scratch = Path(sys.argv[2])

    def progress(phase: str) -> None:
        if place.rank == 0:
            (scratch / "phase").write_text(phase)

    status = run_rank(request, place, progress)
    (scratch / f"status-{place.rank}").write_text(str(status))
    sys.stdout.flush()
    os._exit(0 if status in (EQUAL, DIFFERENT) else 1)


if __name__ == "__main__":
    main()
