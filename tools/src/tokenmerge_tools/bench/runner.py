"""Measures every cell of a benchmark, and appends its record to the results file when it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tokenmerge_tools.bench.grid import FUSED, BenchOptions, Cell, Setting, plan_cells
from tokenmerge_tools.bench.loaded_model import LoadedModel, load_model
from tokenmerge_tools.bench.prepare import CellBuilder, PreparedCell, compile_cache
from tokenmerge_tools.failures import Failure
from tokenmerge_tools.machine import environment, source_commit
from tokenmerge_tools.pipelines.loading import free_memory
from tokenmerge_tools.pipelines.settings import resolve_device, resolve_dtype
from tokenmerge_tools.records.file import ResultsFile, UnfinishedCells
from tokenmerge_tools.records.kinds import CellRecord, key_of
from tokenmerge_tools.timing import interleaved, peak_memory_meaning

# A compiled cell may compile again in its second call, because its first call changed the model's state.
_COMPILED_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class CellProgress:
    """The progress after one more cell is done: how many are done, and whether an earlier run measured it."""

    record: CellRecord
    number: int
    total: int
    resumed: bool


def run_grid(
    options: BenchOptions,
    out: Path,
    on_cell: Callable[[CellProgress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> list[CellRecord]:
    """Measure the cells that are not yet in the results file, and return all records, ordered by the axes.

    The calls of all cells of one setting are interleaved. A cell that runs out of memory or cannot run gets a
    record with that status, and the benchmark continues.
    """
    device = resolve_device(options.device)
    settings, cells = plan_cells(options, device)
    with ResultsFile(out, CellRecord) as file, _threads(options.threads):
        for note in file.notes:
            on_note(note)
        run = _Benchmark(device, file, on_cell, total=len(settings) * len(cells))
        for setting in settings:
            run.measure(setting, cells)
        return run.records


class _Benchmark:
    """One run of a benchmark, and its records so far."""

    def __init__(
        self,
        device: torch.device,
        file: ResultsFile[CellRecord],
        on_cell: Callable[[CellProgress], None],
        total: int,
    ) -> None:
        self.device = device
        self.file = file
        self.on_cell = on_cell
        self.total = total
        self.records: list[CellRecord] = []
        found = environment()
        name = f"{device.type}:{device.index or 0}" if device.type == "cuda" else device.type
        names = {entry["device"]: str(entry["name"]) for entry in found["devices"]}
        self.machine = {
            "device": str(device),
            "device_name": names.get(name, device.type),
            "threads": torch.get_num_threads(),
            "environment": found,
            "commit": source_commit(),
        }
        self.unfinished = UnfinishedCells(file.path)
        self._loaded: tuple[object, LoadedModel] | None = None

    def measure(self, setting: Setting, cells: Sequence[Cell]) -> None:
        """Measure the cells of a setting that are not in the file yet, or failed."""
        pending = []
        for cell in cells:
            known = self.file.records.get(key_of(self._conditions(setting, cell)))
            if known is None or known.status == "error":
                pending.append(cell)
            else:
                self._tell(known, resumed=True)
        if not pending:
            return
        try:
            model = self._load(setting)
        except Exception as error:
            failure = Failure.of(error)
            # The hub may be down, or a folder incomplete: an error is tried again in the next run.
            if failure.status == "unavailable":
                failure = dataclasses.replace(failure, status="error")
            for cell in pending:
                self._finish(setting, cell, failure)
            return
        with contextlib.ExitStack() as variants:
            if any(cell.compile for cell in pending):
                variants.enter_context(compile_cache())
            self._measure(setting, pending, CellBuilder(model, setting, variants))
        free_memory()

    def _measure(self, setting: Setting, cells: Sequence[Cell], builder: CellBuilder) -> None:
        """Measure and record these cells, and run the dense cells that they are compared with."""
        wanted: list[Cell] = []
        for one in cells:
            wanted += [one.dense(FUSED), one.dense()]
        wanted += cells
        prepared = {cell: builder.prepare(cell) for cell in dict.fromkeys(wanted)}
        waiting = {str(cell): cell for cell in cells}
        for name in self._timed(setting, {str(cell): ready for cell, ready in prepared.items()}):
            cell = waiting.get(name)
            if cell is None or not prepared[cell].is_finished(setting.rounds):
                continue
            ready = prepared[cell]
            del waiting[name]
            facts = _facts(builder, ready)
            if ready.failure is not None:
                self._finish(setting, cell, ready.failure, facts)
                continue
            dense = {"dense": prepared[cell.dense(FUSED)], "dense, same attention": prepared[cell.dense()]}
            references = {name: tuple(one.seconds) for name, one in dense.items() if one.failure is None}
            seconds = tuple(ready.seconds)
            peak = ready.peak_bytes
            self._finish(setting, cell, None, facts, references=references, seconds=seconds, peak_bytes=peak)
        self.unfinished.clear()

    def _timed(self, setting: Setting, cells: Mapping[str, PreparedCell]) -> Iterator[str]:
        """Warm up and time cells with interleaved calls; yield the name of a cell after each timed call.

        Cells that failed or finished before are yielded first. A cell that fails in the warm-up is yielded
        right after its failure. Rounds that an earlier run timed before it was killed are not repeated. If
        that run was killed within a round, the round continues with the remaining cells.
        """
        rounds = setting.rounds
        keys = {name: key_of(self._conditions(setting, ready.cell)) for name, ready in cells.items()}
        runnable = [name for name, ready in cells.items() if ready.failure is None]
        done = min((len(self.unfinished.calls[keys[name]]) for name in runnable), default=0)
        for name in runnable:
            for call in self.unfinished.calls[keys[name]][: min(done + 1, rounds)]:
                cells[name].add(*call)
        yield from (name for name in cells if cells[name].is_finished(rounds))
        if done >= rounds:
            return
        compiled = any(ready.cell.compile for ready in cells.values())
        for _ in range(max(setting.warmup, _COMPILED_WARM_UP if compiled else 1)):
            for name, ready in cells.items():
                ready.run()
                if ready.failure is not None:
                    yield name
        every = {name: ready.run for name, ready in cells.items()}
        begun = {name: run for name, run in every.items() if len(cells[name].seconds) <= done}
        first = 1 if len(begun) < len(every) else 0  # 1 if a round was interrupted
        for calls, repeat in ((begun, first), (every, rounds - done - first)):
            for measured in interleaved(calls, repeat, self.device):
                ready = cells[measured.variant]
                if ready.failure is None:
                    timed = measured.seconds / ready.calls, measured.peak_bytes
                    ready.add(*timed)
                    self.unfinished.add(keys[measured.variant], timed)
                yield measured.variant

    def _conditions(self, setting: Setting, cell: Cell) -> dict[str, Any]:
        # Records of whole pipelines, which earlier releases measured too, have another scope.
        call = {"scope": "denoiser", "scheduler": None, "attention": cell.attention, "compile": cell.compile}
        variant = {"variant": cell.spec.name, "settings": dict(cell.spec.settings)}
        return {**dataclasses.asdict(setting), **call, **variant, **self.machine}

    def _finish(
        self,
        setting: Setting,
        cell: Cell,
        failure: Failure | None = None,
        facts: Mapping[str, Any] | None = None,
        **figures: Any,
    ) -> None:
        record = CellRecord(
            conditions=self._conditions(setting, cell),
            status="ok" if failure is None else failure.status,
            message="" if failure is None else failure.message,
            facts={"peak_memory": peak_memory_meaning(self.device), **(facts or {})},
            finished=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **figures,
        )
        self.file.append(record)
        self._tell(record, resumed=False)

    def _tell(self, record: CellRecord, resumed: bool) -> None:
        self.records.append(record)
        self.on_cell(CellProgress(record, len(self.records), self.total, resumed))

    def _load(self, setting: Setting) -> LoadedModel:
        arguments = {name: getattr(setting, name) for name in ("model", "guidance", "seed")}
        wanted = (setting.dtype, *arguments.values())
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = None
            free_memory()
            dtype = resolve_dtype(setting.dtype, self.device)
            self._loaded = wanted, load_model(dtype=dtype, device=self.device, **arguments)
        return self._loaded[1]


def _facts(builder: CellBuilder, ready: PreparedCell) -> dict[str, Any]:
    report = ready.report
    config = ready.config
    notes = list(builder.model.notes)
    facts: dict[str, Any] = {"samples": builder.samples}
    if ready.failure is None and report is not None and config is not None:
        merged = report.flops_merged if report.flops_mean is None else report.flops_mean
        facts |= {"config": config.to_dict(), "kept_bytes": report.kept_bytes}
        facts |= {"flops_dense": report.flops_dense, "flops_merged": merged}
        if report.step_signs:
            notes.append(f"plan: {report.step_signs}")
        notes += report.notes
        if ready.calls > 1:
            notes.append(f"the mean over the {ready.calls} calls of a generation, since their cost differs")
    return {**facts, "notes": notes}


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
