"""Measures the cells of one setting with interleaved calls, and records each cell when it is finished."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tokenmerge_tools.bench.cells import FUSED, Cell, Setting
from tokenmerge_tools.bench.inputs import InputSize
from tokenmerge_tools.bench.loaded_model import LoadedModel
from tokenmerge_tools.bench.prepare import CellBuilder, PreparedCell
from tokenmerge_tools.records.file import UnfinishedCells
from tokenmerge_tools.records.kinds import key_of
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
        unfinished: UnfinishedCells,
        conditions: Callable[[Cell], dict[str, Any]],
        finish: Callable[..., None],
    ) -> None:
        self.setting, self.device, self.unfinished = setting, device, unfinished
        self.conditions, self.finish = conditions, finish
        samples = setting.batch * (2 if model.guided else 1)
        in_call = samples if setting.scope == "denoiser" else setting.batch
        size = InputSize(setting.height, setting.width, model.scale, in_call, setting.frames or 1)
        self.builder = CellBuilder(model, size, samples, setting.steps, variants)
        self.notes = list(model.notes)
        self.facts: dict[str, Any] = {"samples": samples, "notes": self.notes}

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure and record these cells, and run the dense cells that they are compared with."""
        prepared = {cell: self.builder.prepare(cell) for cell in _with_dense(cells)}
        waiting = {str(cell): cell for cell in cells}
        for name in self._timed({str(cell): ready for cell, ready in prepared.items()}):
            cell = waiting.get(name)
            if cell is None or not (ready := prepared[cell]).is_finished(self.setting.rounds):
                continue
            del waiting[name]
            own = self._facts(ready, prepared[cell.dense()])
            if ready.failure is not None:
                self.finish(cell, ready.failure, facts=own)
                continue
            dense = {"dense": prepared[cell.dense(FUSED)], "dense, same attention": prepared[cell.dense()]}
            references = {name: tuple(one.seconds) for name, one in dense.items() if one.failure is None}
            figures = {"seconds": tuple(ready.seconds), "peak_bytes": ready.peak_bytes}
            self.finish(cell, references=references, facts=own, **figures)
        self.unfinished.clear()

    def _timed(self, cells: Mapping[str, PreparedCell]) -> Iterator[str]:
        """Warm up and time cells with interleaved calls; yield the name of a cell after each timed call.

        Cells that failed or finished before are yielded first. A cell that fails in the warm-up is yielded
        right after its failure. Rounds that an earlier run timed before it was killed are not repeated. If
        that run was killed within a round, the round continues with the remaining cells.
        """
        rounds = self.setting.rounds
        keys = {name: key_of(self.conditions(ready.cell)) for name, ready in cells.items()}
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
        if ready.failure is None and ready.cell.merged is not None:
            facts["steps_used"] = ready.steps
            notes.append(f"{ready.steps} of {self.setting.steps} steps")
        elif ready.failure is None and _is_block_cache(ready.cell) and ready.flops and dense.flops:
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


def _is_block_cache(cell: Cell) -> bool:
    kind = VARIANTS[cell.spec.name]
    return kind.is_faster and kind.method is None


def _with_dense(cells: Iterable[Cell]) -> list[Cell]:
    cells = list(cells)
    dense = [cell.dense(attention) for cell in cells for attention in (FUSED, None)]
    return list(dict.fromkeys([*dense, *cells]))
