"""Draw dense and every variant with the same prompts and seeds, measure, and write records and samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.cell import free_memory
from tokenmerge.measure.bench.store import ResultsFile
from tokenmerge.measure.evaluate.draw import CONTINUES, Task, draw, missing
from tokenmerge.measure.evaluate.measure import Measured, describe, measure
from tokenmerge.measure.evaluate.metrics import Metrics, load_metrics
from tokenmerge.measure.evaluate.options import EvaluateOptions
from tokenmerge.measure.evaluate.plan import Plan, make_plan
from tokenmerge.measure.evaluate.processes import Processes, processes
from tokenmerge.measure.evaluate.records import quality_records
from tokenmerge.measure.evaluate.samples import pack, sample_records, unpack, write_sheet
from tokenmerge.measure.files import prepare_folder, write_json
from tokenmerge.measure.pipelines.call import PipelineCall, latent_scale
from tokenmerge.measure.pipelines.loading import load_pipeline, require_diffusers
from tokenmerge.measure.pipelines.settings import set_attention, set_scheduler
from tokenmerge.measure.pipelines.shared_weights import denoising_models
from tokenmerge.measure.pipelines.sizes import check_size
from tokenmerge.measure.reporting.quality import QualityRecord, SampleRecord, read_quality

__all__ = ["Progress", "evaluate"]

T = TypeVar("T")

# Pictures below which FID says more about their number than about the sets.
_ENOUGH_FOR_FID = 2048


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far the drawing is.

    Args:
        done: pictures that the first process has drawn.
        total: pictures that it draws in all; those of earlier runs do not count.
    """

    done: int
    total: int


def evaluate(
    options: EvaluateOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> list[QualityRecord] | None:
    """Draw what is not drawn yet, measure all of it, and append the figures to the results file.

    Pictures that earlier runs drew under the same conditions are taken as they are: a run that was cut off
    continues, and one with more prompts, variants or metrics does only what is new. Under ``accelerate
    launch`` the batches are split over the processes; the figures are those of a single process.

    Args:
        options: what to do.
        on_progress: called as pictures are written, in the first process alone.
        on_note: called with what the user should know, in words.

    Returns:
        The figures, dense first, each variant's categories after its whole; None in every process but the
        first.

    Raises:
        TokenMergingError: an option does not fit the model or the machine. What costs little to check is
            checked before the weights are loaded, and whether each metric works before the first picture.
    """
    require_diffusers("tokenmerge evaluate")
    with processes(options.device) as team:
        plan = make_plan(options, team.device)
        # Machines differ in the times of their files: pictures go where the first process puts them.
        plan = dataclasses.replace(plan, layout=team.gather(plan.layout)[0])
        run = _Run(options, plan, team, on_progress if team.is_main else lambda progress: None)
        if team.count > 1 and team.is_main:
            on_note(f"{team.count} processes share the prompts")
        if not team.is_main:
            run.load_metrics(lambda note: None)
            run.draw_and_measure()
            return None
        with ResultsFile(options.out, read_quality) as file:
            for note in file.notes:
                on_note(note)
            run.load_metrics(on_note)
            run.draw_and_measure()
            return run.write(file)


class _Run:
    """One run; its attributes are what is known so far."""

    metrics: Metrics
    measured: Measured
    reference: Measured | None

    def __init__(
        self,
        options: EvaluateOptions,
        plan: Plan,
        team: Processes,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.options, self.plan, self.team, self.on_progress = options, plan, team, on_progress
        # Formed before they are split, so that a picture's neighbours do not depend on how many processes
        # there are: kernels round differently for another batch.
        self.batches = team.share(_batches(list(enumerate(plan.items)), options.batch))
        self.shown = [item for item in plan.items if item.seed == options.seed][: options.samples]

    def load_metrics(self, on_note: Callable[[str], None]) -> None:
        """Make sure that all metrics work, before hours are spent on pictures."""
        self.metrics = load_metrics(self.options.wanted(), [p.text for p in self.plan.prompts], on_note)
        names = [metric.name for metric in self.metrics.of_sets]
        count = len(self.plan.items)
        if names and count < 2:
            raise ConfigError(f"{', '.join(names)}: expected at least 2 pictures, got {count}; add --seeds 2")
        if "fid" in names and count < _ENOUGH_FOR_FID:
            on_note(f"fid of {count} pictures is far above that of many; kid is not")

    def draw_and_measure(self) -> None:
        """Draw what is missing of this process's share, measure the share, and gather all shares."""
        plan, team = self.plan, self.team
        prepare_folder(plan.layout.folder)
        if team.is_main:
            write_json(plan.layout.folder / "conditions.json", plan.layout.conditions, CONTINUES)
        items = [[item for _, item in batch] for batch in self.batches]
        tasks = missing(items, plan.variants, plan.layout)
        if tasks:
            self._draw(tasks)
            free_memory()
        self.metrics.to(team.device)
        mine = measure(self.batches, plan.variants, plan.layout, self.metrics)
        self.measured = Measured.merge(team.gather(mine))
        self.reference = None
        if plan.reference is not None and self.metrics.features:
            paths = _batches(list(enumerate(plan.reference.pictures)), self.options.batch)
            self.reference = Measured.merge(team.gather(describe(team.share(paths), self.metrics)))
        packed = team.gather(pack(self.shown, plan.variants, plan.layout) if team.count > 1 else {})
        if team.is_main:
            unpack(packed)

    def _draw(self, tasks: Sequence[Task]) -> None:
        options, plan = self.options, self.plan
        pipe = load_pipeline(plan.source, plan.dtype, self.team.device)
        if options.scheduler is not None:
            set_scheduler(pipe, options.scheduler)
        set_attention(list(denoising_models(pipe).values()), options.attention)
        pipe.set_progress_bar_config(disable=True)
        check_size(plan.size, latent_scale(pipe))
        call = PipelineCall.prepare(pipe, options.drawing(plan.prompts[0].text), plan.size)
        total, done = sum(len(task.items) for task in tasks), 0

        def drawn(count: int) -> None:
            nonlocal done
            done += count
            self.on_progress(Progress(done, total))

        self.on_progress(Progress(0, total))
        draw(pipe, call, tasks, plan.layout, drawn)

    def write(self, file: ResultsFile[QualityRecord | SampleRecord]) -> list[QualityRecord]:
        """Append figures and samples that the file does not have yet, and draw the sheet."""
        plan = self.plan
        records = quality_records(plan, self.metrics, self.measured, self.reference, file.records)
        samples = sample_records(self.shown, plan.variants, plan.layout)
        everything: list[QualityRecord | SampleRecord] = [*records, *samples]
        for record in everything:
            if file.records.get(record.key) != record:
                file.append(record)
        if self.options.grid is not None:
            write_sheet(self.options.grid, self.shown, plan.variants, plan.layout)
        return records


def _batches(everything: Sequence[T], size: int) -> list[Sequence[T]]:
    return [everything[start : start + size] for start in range(0, len(everything), size)]
