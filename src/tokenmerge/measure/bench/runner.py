"""Measure every cell of a grid and append each to the results file as it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tokenmerge.measure.bench.cell import compile_cache, free_memory
from tokenmerge.measure.bench.cell_group import GroupRun, Outcome
from tokenmerge.measure.bench.commit import source_commit
from tokenmerge.measure.bench.env import environment
from tokenmerge.measure.bench.failures import Failure
from tokenmerge.measure.bench.grid import Grid
from tokenmerge.measure.bench.loaded_model import Subject, load_subject
from tokenmerge.measure.bench.memory import peak_memory_meaning
from tokenmerge.measure.bench.memory_limit import memory_limit
from tokenmerge.measure.bench.plan import Column, Group, Setting, plan_groups
from tokenmerge.measure.bench.records import CellRecord, key_of
from tokenmerge.measure.bench.store import ResultsFile, read_cells
from tokenmerge.measure.bench.unfinished import UnfinishedCells
from tokenmerge.measure.pipelines.settings import resolve_device, resolve_dtype

__all__ = ["Progress", "run_grid"]


@dataclasses.dataclass(frozen=True)
class Progress:
    """One cell is done, or was done by an earlier run.

    Args:
        record: the cell.
        number: how many are done, this one included.
        total: how many there are.
        resumed: whether an earlier run measured it.
    """

    record: CellRecord
    number: int
    total: int
    resumed: bool


def run_grid(
    grid: Grid,
    out: Path,
    on_cell: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> list[CellRecord]:
    """Measure what is not yet in the results file.

    The cells of one setting take turns, so that a machine that slows down meanwhile touches all alike; each
    runs on its own copy of the model, which shares its weights with the others. A cell that does not fit
    into memory or cannot run is a record that says so, and the run goes on.

    Args:
        grid: what to measure.
        out: the results file, made or continued: cells in it whose conditions are the same are not measured
            again, save those that failed.
        on_cell: called as each cell ends.
        on_note: called with what the user should know, in words.

    Returns:
        The cells of the grid, in its order.

    Raises:
        ConfigError: the grid does not fit the models or the machine; raised before anything is measured.
        RecordNotWrittenError: the disk is full.
    """
    device = resolve_device(grid.device)
    groups = plan_groups(grid, device)
    with ResultsFile(out, read_cells) as file, _threads(grid.threads):
        for note in file.notes:
            on_note(note)
        run = _Run(device, file, on_cell, total=sum(len(group.columns) for group in groups))
        for group in groups:
            run.measure(group)
        return run.records


class _Run:
    """One run of a grid; its attributes are what is known so far."""

    def __init__(
        self,
        device: torch.device,
        file: ResultsFile[CellRecord],
        on_cell: Callable[[Progress], None],
        total: int,
    ) -> None:
        self.device, self.file, self.on_cell, self.total = device, file, on_cell, total
        self.records: list[CellRecord] = []
        found = environment()
        self.machine = {
            "device": str(device),
            "device_name": _device_name(device, found),
            "threads": torch.get_num_threads(),
            "environment": found,
            "commit": source_commit(),
        }
        self.unfinished = UnfinishedCells(file.path)
        self._loaded: tuple[object, Subject] | None = None

    def measure(self, group: Group) -> None:
        """Measure the cells of a group that are not in the file yet."""
        pending = []
        for column in group.columns:
            known = self._recorded(group.setting, column)
            if known is None or known.status == "error":
                pending.append(column)
            else:
                self._tell(known, resumed=True)
        if not pending:
            return
        try:
            subject = self._subject(group.setting)
        except Exception as error:
            failure = Failure.of(error)
            if failure.status == "unavailable":  # a hub that is down or a folder half copied: try again
                failure = dataclasses.replace(failure, status="error")
            outcome = Outcome(failure=failure)
            for column in pending:
                self._finish(group.setting, column, outcome)
            return
        compiled = any(column.compile for column in pending)
        with memory_limit(self.device), contextlib.ExitStack() as variants:
            if compiled:
                variants.enter_context(compile_cache())
            cells = GroupRun(
                group.setting,
                subject,
                self.device,
                variants,
                self._recorded,
                self._finish,
                self.unfinished,
                lambda setting, column: key_of(self.conditions(setting, column)),
            )
            cells.measure(pending)
        free_memory()

    def conditions(self, setting: Setting, column: Column) -> dict[str, Any]:
        """Everything that the figures of a cell depend on."""
        return {**dataclasses.asdict(setting), **column.conditions(), **self.machine}

    def _recorded(self, setting: Setting, column: Column) -> CellRecord | None:
        return self.file.records.get(key_of(self.conditions(setting, column)))

    def _finish(self, setting: Setting, column: Column, outcome: Outcome) -> None:
        """Write one cell's record to the file."""
        failure = outcome.failure
        record = CellRecord(
            conditions=self.conditions(setting, column),
            status="ok" if failure is None else failure.status,
            message="" if failure is None else failure.message,
            seconds=tuple(outcome.seconds),
            peak_bytes=outcome.peak_bytes,
            references={name: tuple(times) for name, times in outcome.references.items()},
            facts={"peak_memory": peak_memory_meaning(self.device), **outcome.facts},
            finished=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )
        self.file.append(record)
        self._tell(record, resumed=False)

    def _tell(self, record: CellRecord, resumed: bool) -> None:
        self.records.append(record)
        self.on_cell(Progress(record, len(self.records), self.total, resumed))

    def _subject(self, setting: Setting) -> Subject:
        arguments = {
            name: getattr(setting, name) for name in ("model", "scope", "scheduler", "guidance", "seed")
        }
        wanted = (setting.dtype, *arguments.values())
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = None
            free_memory()
            dtype = resolve_dtype(setting.dtype, self.device)
            with memory_limit(self.device):
                subject = load_subject(dtype=dtype, device=self.device, **arguments)
            self._loaded = wanted, subject
        return self._loaded[1]


def _device_name(device: torch.device, found: Mapping[str, Any]) -> str:
    index = device.index or 0
    name = f"{device.type}:{index}" if device.type == "cuda" else device.type
    names = {entry["device"]: str(entry["name"]) for entry in found["devices"]}
    return names.get(name, device.type)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
