"""The cells of one setting, measured in turns, each written as a record when it ends."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tokenmerge.measure.bench.cells import FUSED, Cell, Setting
from tokenmerge.measure.bench.failures import Failure
from tokenmerge.measure.bench.fewer_steps import StepCost, steps_that_fit
from tokenmerge.measure.bench.inputs import InputSize
from tokenmerge.measure.bench.loaded_model import LoadedModel
from tokenmerge.measure.bench.prepare import PreparedCell, Workbench
from tokenmerge.measure.bench.records import CellRecord, key_of
from tokenmerge.measure.bench.timing import interleaved
from tokenmerge.measure.bench.unfinished import UnfinishedCells

__all__ = ["CellGroup"]

# A compiled cell can compile once more at its second call, after what changed in the first.
_COMPILED_WARM_UP = 3


class CellGroup:
    """Measures cells of one setting on a loaded model.

    Args:
        setting: what the cells have in common.
        model: the loaded model.
        device: where it is.
        variants: keeps the variants in force until it is closed.
        records: those in the results file, by key.
        unfinished: timed calls of an earlier run that was killed, and of this one.
        conditions: the conditions that a cell's record has.
        finish: writes the record of a cell, from its failure, if any, and the record's other fields.
    """

    def __init__(
        self,
        setting: Setting,
        model: LoadedModel,
        device: torch.device,
        variants: contextlib.ExitStack,
        records: Mapping[str, CellRecord],
        unfinished: UnfinishedCells,
        conditions: Callable[[Cell], dict[str, Any]],
        finish: Callable[..., None],
    ) -> None:
        self.setting, self.device, self.records, self.unfinished = setting, device, records, unfinished
        self.conditions, self.finish = conditions, finish
        samples = setting.batch * (2 if model.guided else 1)
        size = InputSize(
            height=setting.height,
            width=setting.width,
            scale=model.scale,
            samples=samples if setting.scope == "denoiser" else setting.batch,
            frames=setting.frames or 1,
        )
        self.workbench = Workbench(model, size, samples, setting.steps, variants)
        self.notes = list(model.notes)
        self.facts: dict[str, Any] = {"samples": samples, "notes": self.notes}

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure and finish these cells. The dense cells that they are compared with run along."""
        timed = [cell for cell in cells if cell.merged is None]
        self._in_turns({cell: self.workbench.prepare(cell) for cell in _with_dense(timed)}, timed)
        ready: dict[Cell, CellRecord] = {}
        for cell in cells:
            if cell.merged is not None:
                record = self.records.get(key_of(self.conditions(cell.of(cell.merged))))
                if record is not None and record.speedup_same_attention is not None:
                    ready[cell] = record
                else:
                    # The next run tries a failed variant again, and with it the steps that fit into its time.
                    failed = record is not None and record.status == "error"
                    reason = f"{cell.merged.label} has no time here that steps could fit into"
                    self.finish(cell, Failure("error" if failed else "unavailable", reason))
        if self.setting.scope == "denoiser":
            for cell, record in ready.items():
                self._compute(cell, record)
        elif ready:
            self._fewer_steps_in_turns(ready)
        self.unfinished.clear()

    def _in_turns(
        self,
        prepared: Mapping[Cell, PreparedCell],
        wanted: Sequence[Cell],
        facts: Mapping[Cell, Mapping[str, Any]] | None = None,
    ) -> None:
        """Warm up, time in turns, and finish each wanted cell when its last turn ends."""
        waiting = {str(cell): cell for cell in wanted}
        stage = "fewer steps" if facts else "cells"
        for name in self._timed({str(cell): ready for cell, ready in prepared.items()}, stage):
            cell = waiting.get(name)
            if cell is not None and prepared[cell].is_finished(self.setting.rounds):
                del waiting[name]
                self._finish_timed(cell, prepared, facts[cell] if facts else self._facts(prepared[cell]))

    def _timed(self, cells: Mapping[str, PreparedCell], stage: str) -> Iterator[str]:
        """Warm up and time cells in turns; yield the name of each whose turn ended.

        Rounds that an earlier run timed before it was killed are not timed again. A round that it began goes
        on with the cells that are left.

        Args:
            cells: by name, dense ones first.
            stage: tells apart the turns of one setting in which the same cell runs again.
        """
        rounds = self.setting.rounds
        keys = {
            name: f"{key_of(self.conditions(ready.cell))} {stage} {ready.steps}"
            for name, ready in cells.items()
        }
        runnable = [name for name, ready in cells.items() if ready.failure is None]
        done = min((len(self.unfinished.calls(keys[name])) for name in runnable), default=0)
        for name in runnable:
            for call in self.unfinished.calls(keys[name])[: min(done + 1, rounds)]:
                cells[name].add(*call)
        yield from (name for name in cells if cells[name].is_finished(rounds))
        if done >= rounds:
            return
        compiled = any(ready.cell.compile for ready in cells.values())
        for ready in [*cells.values()] * max(self.setting.warmup, _COMPILED_WARM_UP if compiled else 1):
            ready.run()
        every = {name: ready.run for name, ready in cells.items()}
        begun = {name: run for name, run in every.items() if len(cells[name].seconds) <= done}
        first = int(len(begun) < len(every))  # whether a round was cut off
        for calls, repeat in ((begun, first), (every, rounds - done - first)):
            for measured in interleaved(calls, repeat, self.device):
                ready = cells[measured.variant]
                if ready.failure is None:
                    call = measured.seconds / ready.calls, measured.peak_bytes
                    ready.add(*call)
                    self.unfinished.add(keys[measured.variant], call)
                yield measured.variant

    def _finish_timed(
        self, cell: Cell, prepared: Mapping[Cell, PreparedCell], facts: Mapping[str, Any]
    ) -> None:
        ready = prepared[cell]
        if ready.failure is not None:
            self.finish(cell, ready.failure, facts=facts)
            return
        beside = {"dense": cell.dense(FUSED), "dense, same attention": cell.dense()}
        references = {
            name: tuple(prepared[dense].seconds)
            for name, dense in beside.items()
            if prepared[dense].failure is None
        }
        self.finish(
            cell,
            seconds=tuple(ready.seconds),
            peak_bytes=ready.peak_bytes,
            references=references,
            facts=facts,
        )

    def _facts(self, ready: PreparedCell) -> dict[str, Any]:
        report, config = ready.report, ready.config
        if ready.failure or report is None or config is None:
            return self.facts
        mean = f"the mean of the {ready.calls} calls of a generation, some of which cost more than others"
        return {
            **self.facts,
            "config": config.to_dict(),
            "flops_dense": report.flops_dense,
            "flops_merged": report.flops_merged if report.flops_mean is None else report.flops_mean,
            "kept_bytes": report.kept_bytes,
            "notes": [*self.notes, *report.notes, *([] if ready.calls == 1 else [mean])],
        }

    def _steps_facts(self, steps: int, note: str) -> dict[str, Any]:
        return {**self.facts, "steps_used": steps, "notes": [*self.notes, note]}

    def _compute(self, cell: Cell, merged: CellRecord) -> None:
        """Fewer steps for the denoiser alone: nothing has to run, because each step takes the same time."""
        total = self.setting.steps
        dense = _same_attention(merged)
        cost = StepCost(fixed=0.0, per_step=statistics.median(dense))
        steps = steps_that_fit(statistics.median(merged.seconds) * total, cost, most=total)
        note = f"computed from the time of a dense step, not run: {steps} of {total} steps"
        self.finish(
            cell,
            seconds=tuple(seconds * steps / total for seconds in dense),
            references=merged.references,
            facts=self._steps_facts(steps, note),
        )

    def _fewer_steps_in_turns(self, merged: Mapping[Cell, CellRecord]) -> None:
        """Fewer steps for the whole pipeline: work out how many fit, then run them."""
        costs = {dense: self._step_cost(dense) for dense in dict.fromkeys(c.dense() for c in merged)}
        prepared = {cell: self.workbench.prepare(cell) for cell in _with_dense(merged) if cell not in merged}
        facts = {}
        for cell, record in merged.items():
            cost = costs[cell.dense()]
            if isinstance(cost, Failure):
                self.finish(cell, cost)
                continue
            # The dense run of today times the share that merging leaves: the machine may have changed since.
            share = statistics.median(record.seconds) / statistics.median(_same_attention(record))
            total = self.setting.steps
            steps = steps_that_fit((cost.fixed + cost.per_step * total) * share, cost, most=total)
            prepared[cell] = self.workbench.prepare(cell, steps)
            note = f"{steps} of {total} steps"
            if total > 1 and cost.per_step == 0:
                note += ": fewer would save no time that can be told from noise"
            facts[cell] = self._steps_facts(steps, note)
        self._in_turns(prepared, list(facts), facts)

    def _step_cost(self, dense: Cell) -> StepCost | Failure:
        """Time two dense runs in turns, one with half of the steps."""
        total = self.setting.steps
        if total == 1:
            return StepCost(fixed=0.0, per_step=0.0)
        runs = {str(steps): self.workbench.prepare(dense, steps) for steps in (total, total // 2)}
        for _ in self._timed(runs, "cost of a step"):
            pass
        failure = next((ready.failure for ready in runs.values() if ready.failure), None)
        if failure is not None:
            return failure
        whole, half = (statistics.median(ready.seconds) for ready in runs.values())
        return StepCost.of_two_runs(total, whole, total // 2, half)


def _same_attention(record: CellRecord) -> Sequence[float]:
    return record.references["dense, same attention"]


def _with_dense(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, after every dense one that one of them is compared with."""
    cells = list(cells)
    dense = [cell.dense(attention) for cell in cells for attention in (FUSED, None)]
    return list(dict.fromkeys([*dense, *cells]))
