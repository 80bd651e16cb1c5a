"""Measures the cells of one setting with interleaved calls, and records each cell when it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tokenmerge_tools.bench.cells import FUSED, Cell, Setting
from tokenmerge_tools.bench.inputs import InputSize
from tokenmerge_tools.bench.loaded_model import LoadedModel
from tokenmerge_tools.bench.prepare import CellBuilder, PreparedCell
from tokenmerge_tools.failures import Failure
from tokenmerge_tools.records.file import UnfinishedCells
from tokenmerge_tools.records.kinds import CellRecord, key_of
from tokenmerge_tools.timing import interleaved
from tokenmerge_tools.variants.variant import VARIANTS

# A compiled cell may compile again in its second call, because its first call changed the model's state.
_COMPILED_WARM_UP = 3


class CellGroup:
    """Measures cells of one setting on a loaded model.

    ``conditions`` returns the conditions of a cell, as its record has them, and ``finish`` writes the record.
    The variants stay applied until ``variants`` is closed. ``unfinished`` has the timed calls of this run and
    of an earlier run that was killed.
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
        in_call = samples if setting.scope == "denoiser" else setting.batch
        size = InputSize(setting.height, setting.width, model.scale, in_call, setting.frames or 1)
        self.builder = CellBuilder(model, size, samples, setting.steps, variants)
        self.notes = list(model.notes)
        self.facts: dict[str, Any] = {"samples": samples, "notes": self.notes}

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure and record these cells, and run the dense cells that they are compared with."""
        timed = [cell for cell in cells if cell.merged is None]
        self._measure_interleaved({cell: self.builder.prepare(cell) for cell in _with_dense(timed)}, timed)
        ready: dict[Cell, CellRecord] = {}
        for cell in cells:
            if cell.merged is not None:
                record = self.records.get(key_of(self.conditions(cell.of(cell.merged))))
                if record is not None and record.speedup_same_attention is not None:
                    ready[cell] = record
                else:
                    # The next run retries a failed variant, so it must retry this cell as well.
                    failed = record is not None and record.status == "error"
                    reason = f"{cell.merged.label} was not timed here, so the number of steps is unknown"
                    self.finish(cell, Failure("error" if failed else "unavailable", reason))
        if self.setting.scope == "denoiser":
            for cell, record in ready.items():
                self._compute(cell, record)
        elif ready:
            self._measure_fewer_steps(ready)
        self.unfinished.clear()

    def _measure_interleaved(
        self,
        prepared: Mapping[Cell, PreparedCell],
        wanted: Sequence[Cell],
        facts: Mapping[Cell, Mapping[str, Any]] | None = None,
    ) -> None:
        """Warm up, time with interleaved calls, and record each wanted cell after its last call."""
        waiting = {str(cell): cell for cell in wanted}
        stage = "fewer steps" if facts else "cells"
        for name in self._timed({str(cell): ready for cell, ready in prepared.items()}, stage):
            cell = waiting.get(name)
            if cell is None or not (ready := prepared[cell]).is_finished(self.setting.rounds):
                continue
            del waiting[name]
            own = facts[cell] if facts else self._facts(ready, prepared[cell.dense()])
            if ready.failure is not None:
                self.finish(cell, ready.failure, facts=own)
                continue
            dense = {"dense": prepared[cell.dense(FUSED)], "dense, same attention": prepared[cell.dense()]}
            references = {name: tuple(one.seconds) for name, one in dense.items() if one.failure is None}
            figures = {"seconds": tuple(ready.seconds), "peak_bytes": ready.peak_bytes}
            self.finish(cell, references=references, facts=own, **figures)

    def _timed(self, cells: Mapping[str, PreparedCell], stage: str) -> Iterator[str]:
        """Warm up and time cells with interleaved calls; yield the name of a cell after each timed call.

        Cells that failed or finished before are yielded first. A cell that fails in the warm-up is yielded
        right after its failure. Rounds that an earlier run timed before it was killed are not repeated. If
        that run was killed within a round, the round continues with the remaining cells.

        ``cells`` has the dense cells first. ``stage`` distinguishes the timings of one cell within a setting.
        """
        rounds = self.setting.rounds
        keys = {
            name: f"{key_of(self.conditions(ready.cell))} {stage} {ready.steps}"
            for name, ready in cells.items()
        }
        runnable = [name for name, ready in cells.items() if ready.failure is None]
        done = min((len(self.unfinished.calls[keys[name]]) for name in runnable), default=0)
        for name in runnable:
            for call in self.unfinished.calls[keys[name]][: min(done + 1, rounds)]:
                cells[name].add(*call)
        yield from (name for name in cells if cells[name].is_finished(rounds))
        if done >= rounds:
            return
        compiled = any(ready.cell.compile for ready in cells.values())
        has_block_caches = any(_is_block_cache(ready.cell) for ready in cells.values())
        for turn in range(max(self.setting.warmup, _COMPILED_WARM_UP if compiled else 1)):
            for name, ready in cells.items():
                counts = has_block_caches and turn == 0 and ready.report is None
                ready.run_counted() if counts else ready.run()
                if ready.failure is not None:
                    yield name
        every = {name: ready.run for name, ready in cells.items()}
        begun = {name: run for name, run in every.items() if len(cells[name].seconds) <= done}
        first = int(len(begun) < len(every))  # 1 if a round was interrupted
        for calls, repeat in ((begun, first), (every, rounds - done - first)):
            for measured in interleaved(calls, repeat, self.device):
                ready = cells[measured.variant]
                if ready.failure is None:
                    timed = measured.seconds / ready.calls, measured.peak_bytes
                    ready.add(*timed)
                    self.unfinished.add(keys[measured.variant], timed)
                yield measured.variant

    def _facts(self, ready: PreparedCell, dense: PreparedCell) -> dict[str, Any]:
        report, config = ready.report, ready.config
        notes, facts = list(self.notes), dict(self.facts)
        if ready.failure is None and _is_block_cache(ready.cell) and ready.flops and dense.flops:
            facts |= {"flops_dense": dense.flops, "flops_merged": ready.flops}
            notes.append("operations were counted in a run; they are the mean over its calls of the denoiser")
        elif ready.failure is None and report is not None and config is not None:
            merged = report.flops_merged if report.flops_mean is None else report.flops_mean
            facts |= {"config": config.to_dict(), "kept_bytes": report.kept_bytes}
            facts |= {"flops_dense": report.flops_dense, "flops_merged": merged}
            notes += report.notes
            if ready.calls > 1:
                notes.append(
                    f"the mean over the {ready.calls} calls of a generation, since their cost differs"
                )
        return {**facts, "notes": notes}

    def _steps_facts(self, steps: int, note: str) -> dict[str, Any]:
        return {**self.facts, "steps_used": steps, "notes": [*self.notes, note]}

    def _compute(self, cell: Cell, merged: CellRecord) -> None:
        """Compute the time of fewer steps of the denoiser alone, in which every step takes equally long."""
        total, dense = self.setting.steps, merged.references["dense, same attention"]
        cost = StepCost(fixed=0.0, per_step=statistics.median(dense))
        steps = steps_that_fit(statistics.median(merged.seconds) * total, cost, most=total)
        note = f"computed from the time of a dense step, not run: {steps} of {total} steps"
        self.finish(
            cell,
            seconds=tuple(seconds * steps / total for seconds in dense),
            references=merged.references,
            facts=self._steps_facts(steps, note),
        )

    def _measure_fewer_steps(self, merged: Mapping[Cell, CellRecord]) -> None:
        """Find how many dense steps of the whole pipeline take as long as each cell, then time them."""
        costs = {dense: self._step_cost(dense) for dense in dict.fromkeys(c.dense() for c in merged)}
        prepared = {cell: self.builder.prepare(cell) for cell in _with_dense(merged) if cell not in merged}
        facts, total = {}, self.setting.steps
        for cell, record in merged.items():
            cost = costs[cell.dense()]
            if isinstance(cost, Failure):
                self.finish(cell, cost)
                continue
            # Scale the present dense time, because the machine's speed may have changed since the merged run.
            share = 1 / (record.speedup_same_attention or 1.0)
            steps = steps_that_fit((cost.fixed + cost.per_step * total) * share, cost, most=total)
            prepared[cell] = self.builder.prepare(cell, steps)
            note = f"{steps} of {total} steps"
            if total > 1 and cost.per_step == 0:
                note += ": fewer steps would save less time than the noise"
            facts[cell] = self._steps_facts(steps, note)
        self._measure_interleaved(prepared, list(facts), facts)

    def _step_cost(self, dense: Cell) -> StepCost | Failure:
        """Time two dense runs with interleaved calls, one of them with half of the steps."""
        total = self.setting.steps
        if total == 1:
            return StepCost(fixed=0.0, per_step=0.0)
        runs = {str(steps): self.builder.prepare(dense, steps) for steps in (total, total // 2)}
        for _ in self._timed(runs, "cost of a step"):
            pass
        for ready in runs.values():
            if ready.failure is not None:
                return ready.failure
        whole, half = (statistics.median(ready.seconds) for ready in runs.values())
        return StepCost.of_two_runs(total, whole, total // 2, half)


def _is_block_cache(cell: Cell) -> bool:
    kind = VARIANTS[cell.spec.name]
    return kind.is_faster and kind.method is None


def _with_dense(cells: Iterable[Cell]) -> list[Cell]:
    cells = list(cells)
    dense = [cell.dense(attention) for cell in cells for attention in (FUSED, None)]
    return list(dict.fromkeys([*dense, *cells]))


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Linear model of a dense run's time: ``fixed + per_step · steps`` seconds."""

    fixed: float
    per_step: float

    @classmethod
    def of_two_runs(cls, steps: int, seconds: float, fewer_steps: int, fewer_seconds: float) -> StepCost:
        """Fit the model to two timed runs with different numbers of steps.

        >>> StepCost.of_two_runs(20, 11.0, 10, 6.0)
        StepCost(fixed=1.0, per_step=0.5)
        """
        # With very cheap steps, noise can make the slope negative.
        per_step = max((seconds - fewer_seconds) / (steps - fewer_steps), 0.0)
        return cls(max(seconds - per_step * steps, 0.0), per_step)


def steps_that_fit(budget: float, cost: StepCost, most: int) -> int:
    """Return the number of dense steps that fit into ``budget`` seconds, at least 1 and at most ``most``.

    >>> steps_that_fit(6.2, StepCost(fixed=1.0, per_step=0.5), most=20)
    10
    """
    if cost.per_step == 0:
        return most
    # The small constant allows for rounding errors.
    return min(max(math.floor((budget - cost.fixed) / cost.per_step + 1e-9), 1), most)
