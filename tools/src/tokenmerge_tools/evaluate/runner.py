"""Draws dense and all variants with the same prompts and seeds, measures them, and writes the records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge_tools.drawing import Progress, Studio
from tokenmerge_tools.evaluate.drawn import Drawn
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions, Evaluation, plan_evaluation
from tokenmerge_tools.evaluate.measure import Measured, describe, measure
from tokenmerge_tools.evaluate.metrics import Metrics, load_metrics
from tokenmerge_tools.evaluate.picture_store import CONTINUES
from tokenmerge_tools.evaluate.processes import Processes, processes
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.evaluate.results import pack, quality_records, sample_records, unpack, write_sheet
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.files import prepare_folder, write_json
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for
from tokenmerge_tools.pipelines.loading import free_memory, require_diffusers
from tokenmerge_tools.pipelines.settings import check_size
from tokenmerge_tools.records.file import ResultsFile
from tokenmerge_tools.records.kinds import QualityRecord, SampleRecord
from tokenmerge_tools.variants.variant import DENSE

T = TypeVar("T")

# With fewer pictures, FID depends more on their number than on their content.
_ENOUGH_FOR_FID = 2048


def evaluate(
    options: EvaluateOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> list[QualityRecord] | None:
    """Draw the missing pictures, measure all pictures, and append the records to the results file.

    Pictures of earlier runs under the same conditions are reused. So an interrupted run continues, and a run
    with more prompts, variants or metrics only does what is new. Under ``accelerate launch``, the batches are
    split over the processes, and the results are the same as with one process.

    The records are returned in the first process, dense first. Only that process calls ``on_progress`` and
    ``on_note``.
    """
    require_diffusers("tokenmerge evaluate")
    with processes(options.device) as team:
        evaluation = plan_evaluation(options, team.device)
        # The first process names the folder, since modification times of weights differ between machines.
        evaluation = dataclasses.replace(evaluation, store=team.gather(evaluation.store)[0])
        run = _Evaluating(options, evaluation, team, on_progress if team.is_main else lambda progress: None)
        if team.count > 1 and team.is_main:
            on_note(f"{team.count} processes share the prompts")
        if not team.is_main:
            run.load_metrics(lambda note: None)
            run.draw_and_measure()
            return None
        kinds: tuple[type[QualityRecord | SampleRecord], ...] = (QualityRecord, SampleRecord)
        with ResultsFile(options.out, *kinds) as file:
            for note in file.notes:
                on_note(note)
            run.load_metrics(on_note)
            run.draw_and_measure()
            return run.write(file)


class _Evaluating:
    """One run, and its measurements so far."""

    metrics: Metrics
    measured: Measured
    reference: Measured | None

    def __init__(
        self,
        options: EvaluateOptions,
        evaluation: Evaluation,
        team: Processes,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.options, self.evaluation, self.team, self.on_progress = options, evaluation, team, on_progress
        # Batches are formed before they are split over processes. Otherwise pictures would depend on the
        # number of processes, since kernels round differently for another batch size.
        self.batches = team.share(_batches(list(enumerate(evaluation.items)), options.batch))
        self.shown = [item for item in evaluation.items if item.seed == options.seed][: options.samples]

    def load_metrics(self, on_note: Callable[[str], None]) -> None:
        """Load all metrics before any picture is drawn."""
        self.metrics = load_metrics(self.options.wanted(), [p.text for p in self.evaluation.prompts], on_note)
        names = [metric.name for metric in self.metrics.of_sets]
        count = len(self.evaluation.items)
        if names and count < 2:
            raise ConfigError(f"{', '.join(names)}: expected at least 2 pictures, got {count}; add --seeds 2")
        if "fid" in names and count < _ENOUGH_FOR_FID:
            on_note(f"fid of only {count} pictures is biased upwards; kid is unbiased")

    def draw_and_measure(self) -> None:
        """Draw the missing pictures of this process's share, measure the share, and gather all shares."""
        evaluation, team = self.evaluation, self.team
        prepare_folder(evaluation.store.folder)
        if team.is_main:
            write_json(evaluation.store.folder / "conditions.json", evaluation.store.conditions, CONTINUES)
        items = [[item for _, item in batch] for batch in self.batches]
        # Batch by batch, so that an interrupted run leaves complete batches.
        tasks = [
            (variant, left)
            for batch in items
            for variant in evaluation.variants
            if (left := [item for item in batch if not evaluation.store.picture(variant, item).exists()])
        ]
        if tasks:
            self._draw(tasks)
            free_memory()
        self.metrics.to(team.device)
        mine = measure(self.batches, evaluation.variants, evaluation.store, self.metrics)
        self.measured = Measured.merge(team.gather(mine))
        self.reference = None
        if evaluation.reference is not None and self.metrics.features:
            paths = _batches(list(enumerate(evaluation.reference.pictures)), self.options.batch)
            self.reference = Measured.merge(team.gather(describe(team.share(paths), self.metrics)))
        packed = team.gather(
            pack(self.shown, evaluation.variants, evaluation.store) if team.count > 1 else {}
        )
        if team.is_main:
            unpack(packed)

    def _draw(self, tasks: Sequence[tuple[Drawn, Sequence[Item]]]) -> None:
        """Draw, time and write pictures. A picture appears on the disk only when it is complete."""
        evaluation = self.evaluation
        drawing = self.options.drawing(evaluation.prompts[0].text)
        pipe = load_pipeline_for(drawing, evaluation.source, evaluation.dtype, self.team.device)
        width, height = check_size(evaluation.size, latent_scale(pipe))
        call = PipelineCall.prepare(pipe, drawing, evaluation.size, frames=evaluation.frames)
        done, total = 0, sum(len(items) for _, items in tasks)
        configs: dict[Drawn, ToMeConfig | None] = {}
        self.on_progress(Progress("drawing", done, total))
        with Studio(pipe) as studio:
            for variant, items in tasks:
                prompts, seeds = [item.prompt.text for item in items], [item.seed for item in items]
                own, name = call.of_pictures(prompts, seeds).with_steps(variant.steps), variant.label
                try:
                    if variant not in configs:
                        configs[variant] = config = variant.spec.config(
                            pipe, height=height, width=width, steps=variant.steps, guidance=call.guidance
                        )
                        if name != DENSE:
                            studio.add(name, partial(variant.spec.apply, config=config))
                        studio.warm_up(name, own)
                    (found,) = studio.rounds({name: own})
                except Exception as error:
                    if is_out_of_memory(error):
                        raise ConfigError(
                            f"batch: {len(items)} pictures at once do not fit into memory; lower --batch, "
                            "which changes pictures only by rounding; the finished ones are kept"
                        ) from error
                    raise
                seconds = found.seconds / len(items)
                for item, picture in zip(items, found.pictures, strict=True):
                    evaluation.store.save(variant, item, picture, seconds, configs[variant], CONTINUES)
                done += len(items)
                self.on_progress(Progress("drawing", done, total))

    def write(self, file: ResultsFile[QualityRecord | SampleRecord]) -> list[QualityRecord]:
        """Append new records and samples to the file, and write the sheet."""
        evaluation = self.evaluation
        records = quality_records(evaluation, self.metrics, self.measured, self.reference, file.records)
        samples = sample_records(self.shown, evaluation.variants, evaluation.store)
        everything: list[QualityRecord | SampleRecord] = [*records, *samples]
        for record in everything:
            if file.records.get(record.key) != record:
                file.append(record)
        if self.options.grid is not None:
            write_sheet(self.options.grid, self.shown, evaluation.variants, evaluation.store)
        return records


def _batches(everything: Sequence[T], size: int) -> list[Sequence[T]]:
    return [everything[start : start + size] for start in range(0, len(everything), size)]
