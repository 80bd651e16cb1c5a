"""Measures every cell of a benchmark, and appends its record to the results file when it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenmerge_tools.bench.cell_group import CellGroup
from tokenmerge_tools.bench.cells import Cell, Setting, plan_cells
from tokenmerge_tools.bench.grid import BenchOptions
from tokenmerge_tools.bench.loaded_model import LoadedModel, load_model
from tokenmerge_tools.bench.prepare import compile_cache
from tokenmerge_tools.failures import Failure
from tokenmerge_tools.machine import environment, source_commit
from tokenmerge_tools.pipelines.loading import free_memory
from tokenmerge_tools.pipelines.settings import resolve_device, resolve_dtype
from tokenmerge_tools.records.file import ResultsFile, UnfinishedCells
from tokenmerge_tools.records.kinds import CellRecord, key_of
from tokenmerge_tools.timing import peak_memory_meaning


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

    The calls of all cells of one setting are interleaved, so that changes in the machine's speed affect all
    alike. Each cell runs on its own copy of the model; the copies share their weights. A cell that runs out
    of memory or cannot run gets a record with that status, and the benchmark continues.
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
        self.device, self.file, self.on_cell, self.total = device, file, on_cell, total
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
        conditions, finish = partial(self._conditions, setting), partial(self._finish, setting)
        pending = []
        for cell in cells:
            known = self.file.records.get(key_of(conditions(cell)))
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
                finish(cell, failure)
            return
        with contextlib.ExitStack() as variants:
            if any(cell.compile for cell in pending):
                variants.enter_context(compile_cache())
            group = (setting, model, self.device, variants, self.unfinished, conditions, finish)
            CellGroup(*group).measure(pending)
        free_memory()

    def _conditions(self, setting: Setting, cell: Cell) -> dict[str, Any]:
        return {**dataclasses.asdict(setting), **cell.conditions(), **self.machine}

    def _finish(
        self,
        setting: Setting,
        cell: Cell,
        failure: Failure | None = None,
        facts: Mapping[str, Any] | None = None,
        **figures: Any,
    ) -> None:
        """Append the record of one cell to the file."""
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
        names = ("model", "scope", "scheduler", "guidance", "seed")
        arguments = {name: getattr(setting, name) for name in names}
        wanted = (setting.dtype, *arguments.values())
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = None
            free_memory()
            dtype = resolve_dtype(setting.dtype, self.device)
            self._loaded = wanted, load_model(dtype=dtype, device=self.device, **arguments)
        return self._loaded[1]


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
