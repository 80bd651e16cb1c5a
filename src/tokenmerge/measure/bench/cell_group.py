"""The cells of one setting, measured in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tokenmerge.measure.bench.cell import Prepared, Workbench
from tokenmerge.measure.bench.failures import Failure
from tokenmerge.measure.bench.fewer_steps import StepCost, steps_that_fit
from tokenmerge.measure.bench.inputs import InputSize
from tokenmerge.measure.bench.loaded_model import Subject
from tokenmerge.measure.bench.plan import FUSED, Column, Setting
from tokenmerge.measure.bench.records import CellRecord
from tokenmerge.measure.bench.timing import interleaved
from tokenmerge.measure.bench.unfinished import UnfinishedCells

__all__ = ["GroupRun", "Outcome"]

# What is compiled after a cell's first call can make it compile once more at its second.
_COMPILED_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a cell; the fields are those of a record."""

    failure: Failure | None = None
    seconds: Sequence[float] = ()
    peak_bytes: int | None = None
    references: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class GroupRun:
    """Measures cells of one setting on a loaded model.

    Args:
        setting: what they have in common.
        subject: the model.
        device: where it is.
        variants: keeps the variants in force until it is closed.
        recorded: the record of a cell that is finished, or None.
        finish: called as each cell ends.
        unfinished: timed calls of an earlier run that was cut off, and of this one.
        key: name of a cell in ``unfinished``.
    """

    def __init__(
        self,
        setting: Setting,
        subject: Subject,
        device: torch.device,
        variants: contextlib.ExitStack,
        recorded: Callable[[Setting, Column], CellRecord | None],
        finish: Callable[[Setting, Column, Outcome], None],
        unfinished: UnfinishedCells,
        key: Callable[[Setting, Column], str],
    ) -> None:
        self.setting, self.device, self.recorded = setting, device, recorded
        self._finish, self._unfinished, self._key = finish, unfinished, key
        samples = setting.batch * (2 if subject.guided else 1)
        size = InputSize(
            height=setting.height,
            width=setting.width,
            scale=subject.scale,
            samples=samples if setting.scope == "denoiser" else setting.batch,
            frames=setting.frames or 1,
        )
        self.bench = Workbench(subject, size, samples, setting.steps, variants)
        self.notes = list(subject.notes)
        self.facts: dict[str, Any] = {"samples": samples, "notes": self.notes}

    def measure(self, columns: Sequence[Column]) -> None:
        """Measure and finish these cells; dense ones that they are compared with run along."""
        timed = [column for column in columns if column.merged is None]
        self._in_turns({column: self.bench.prepare(column) for column in _with_dense(timed)}, timed)
        ready: dict[Column, CellRecord] = {}
        for column in columns:
            if column.merged is not None:
                record = self.recorded(self.setting, column.of(column.merged))
                if record is not None and record.speedup_same_attention is not None:
                    ready[column] = record
                else:
                    # What failed is tried again by the next run, and so are the steps that stand beside it.
                    failed = record is not None and record.status == "error"
                    reason = f"{column.merged.label} has no time here that steps could fit into"
                    failure = Failure("error" if failed else "unavailable", reason)
                    self._finish(self.setting, column, Outcome(failure=failure))
        if self.setting.scope == "denoiser":
            for column, record in ready.items():
                self._finish(self.setting, column, self._computed(record))
        elif ready:
            self._fewer_steps_in_turns(ready)
        self._unfinished.clear()

    def _in_turns(
        self,
        cells: Mapping[Column, Prepared],
        wanted: Sequence[Column],
        facts: Mapping[Column, Mapping[str, Any]] | None = None,
    ) -> None:
        """Warm up, time in turns, and finish each wanted cell as its last turn ends."""
        by_name = {str(column): column for column in cells}
        waiting = set(wanted)
        stage = "fewer steps" if facts else "cells"
        for name in self._timed({name: cells[column] for name, column in by_name.items()}, stage):
            column = by_name[name]
            cell = cells[column]
            if column in waiting and (cell.failure or len(cell.seconds) == self.setting.rounds):
                waiting.remove(column)
                more = facts[column] if facts else self._facts(cell)
                self._finish(self.setting, column, _outcome(column, cells, more))

    def _timed(self, cells: Mapping[str, Prepared], stage: str) -> Iterator[str]:
        """Warm up and time cells in turns; yield the name of each whose turn ended.

        Rounds that an earlier run timed before it was cut off are not timed again. One that it began goes on
        with the cells that are left.

        Args:
            cells: by name; dense ones first.
            stage: tells apart the turns of one setting in which the same cell runs again.
        """
        rounds = self.setting.rounds
        keys = {
            name: f"{self._key(self.setting, cell.column)} {stage} {cell.steps}"
            for name, cell in cells.items()
        }
        done = min((len(self._unfinished.calls(key)) for key in keys.values()), default=rounds)
        for name, cell in cells.items():
            for call in self._unfinished.calls(keys[name])[: min(done + 1, rounds)]:
                cell.add(*call)
        yield from (name for name, cell in cells.items() if len(cell.seconds) == rounds)
        if done >= rounds:
            return
        compiled = any(cell.column.compile for cell in cells.values())
        for cell in [*cells.values()] * max(self.setting.warmup, _COMPILED_WARM_UP if compiled else 1):
            cell.run()
        begun = {name: cell.run for name, cell in cells.items() if len(cell.seconds) == done}
        every = {name: cell.run for name, cell in cells.items()}
        turns = (
            [(begun, 1), (every, rounds - done - 1)] if len(begun) < len(every) else [(every, rounds - done)]
        )
        for calls, repeat in turns:
            for measured in interleaved(calls, repeat, self.device):
                cell = cells[measured.variant]
                if cell.failure is None:
                    call = measured.seconds / cell.calls, measured.peak_bytes
                    cell.add(*call)
                    self._unfinished.add(keys[measured.variant], call)
                yield measured.variant

    def _facts(self, cell: Prepared) -> dict[str, Any]:
        report, config = cell.report, cell.config
        if cell.failure or report is None or config is None:
            return self.facts
        mean = f"the mean of the {cell.calls} calls of a generation, some of which cost more than others"
        return {
            **self.facts,
            "config": config.to_dict(),
            "flops_dense": report.flops_dense,
            "flops_merged": report.flops_merged if report.flops_mean is None else report.flops_mean,
            "kept_bytes": report.kept_bytes,
            "notes": [*self.notes, *report.notes, *([] if cell.calls == 1 else [mean])],
        }

    def _computed(self, merged: CellRecord) -> Outcome:
        """Fewer steps for the denoiser alone: nothing needs to run, for each step takes the same time."""
        total = self.setting.steps
        dense = _same_attention(merged)
        cost = StepCost(fixed=0.0, per_step=statistics.median(dense))
        steps = steps_that_fit(statistics.median(merged.seconds) * total, cost, most=total)
        note = f"computed from the time of a dense step, not run: {steps} of {total} steps"
        return Outcome(
            seconds=[seconds * steps / total for seconds in dense],
            references=merged.references,
            facts={**self.facts, "steps_used": steps, "notes": [*self.notes, note]},
        )

    def _fewer_steps_in_turns(self, merged: Mapping[Column, CellRecord]) -> None:
        """Fewer steps for the whole pipeline: work out how many fit, then run them."""
        costs = {dense: self._step_cost(dense) for dense in dict.fromkeys(c.dense() for c in merged)}
        cells: dict[Column, Prepared] = {
            column: self.bench.prepare(column) for column in _with_dense(list(merged))[: -len(merged)]
        }
        facts = {}
        for column, record in merged.items():
            cost = costs[column.dense()]
            if isinstance(cost, Failure):
                self._finish(self.setting, column, Outcome(failure=cost))
                continue
            # The dense run of today times the share that merging leaves: the machine may have changed since.
            share = statistics.median(record.seconds) / statistics.median(_same_attention(record))
            total = self.setting.steps
            steps = steps_that_fit((cost.fixed + cost.per_step * total) * share, cost, most=total)
            cells[column] = self.bench.prepare(column, steps)
            note = f"{steps} of {total} steps"
            if total > 1 and cost.per_step == 0:
                note += ": fewer would save no time that can be told from noise"
            facts[column] = {**self.facts, "steps_used": steps, "notes": [*self.notes, note]}
        self._in_turns(cells, list(facts), facts)

    def _step_cost(self, dense: Column) -> StepCost | Failure:
        """Time two dense runs in turns, one with half of the steps."""
        total = self.setting.steps
        if total == 1:
            return StepCost(fixed=0.0, per_step=0.0)
        runs = {str(steps): self.bench.prepare(dense, steps) for steps in (total, total // 2)}
        for _ in self._timed(runs, "cost of a step"):
            pass
        failure = next((cell.failure for cell in runs.values() if cell.failure), None)
        if failure is not None:
            return failure
        whole, half = (statistics.median(cell.seconds) for cell in runs.values())
        return StepCost.of_two_runs(total, whole, total // 2, half)


def _outcome(column: Column, cells: Mapping[Column, Prepared], facts: Mapping[str, Any]) -> Outcome:
    cell = cells[column]
    if cell.failure is not None:
        return Outcome(failure=cell.failure, facts=facts)
    beside = {"dense": column.dense(FUSED), "dense, same attention": column.dense()}
    references = {
        name: cells[dense].seconds for name, dense in beside.items() if cells[dense].failure is None
    }
    return Outcome(seconds=cell.seconds, peak_bytes=cell.peak_bytes, references=references, facts=facts)


def _same_attention(record: CellRecord) -> Sequence[float]:
    return record.references["dense, same attention"]


def _with_dense(columns: Sequence[Column]) -> list[Column]:
    """The columns, after every dense one that one of them is compared with."""
    dense = [column.dense(attention) for column in columns for attention in (FUSED, None)]
    return list(dict.fromkeys([*dense, *columns]))
