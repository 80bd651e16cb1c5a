"""Draws dense and all variants with the same prompts and seeds, measures them, and writes the records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tokenmerge.api import Patch
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError, TokenMergingError, UnsupportedModelError, reason_of
from tokenmerge_tools.drawing import Progress, Studio
from tokenmerge_tools.evaluate.distances import check_count
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions, Evaluation, plan_evaluation
from tokenmerge_tools.evaluate.measure import measure, quality_records, sample_records
from tokenmerge_tools.evaluate.metrics import Metrics, load_metrics
from tokenmerge_tools.evaluate.picture_store import CONTINUES
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.files import prepare_folder, write_json
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for
from tokenmerge_tools.pipelines.loading import free_memory, require_diffusers
from tokenmerge_tools.pipelines.settings import check_size, resolve_device
from tokenmerge_tools.records.file import ResultsFile
from tokenmerge_tools.records.kinds import QualityRecord, SampleRecord
from tokenmerge_tools.variants.rivals import RIVALS
from tokenmerge_tools.variants.variant import DENSE, VARIANTS, Variant


def evaluate(
    options: EvaluateOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> list[QualityRecord]:
    """Draw the missing images, measure all images, and append the records to the results file.

    Images of earlier runs under the same conditions are reused. So an interrupted run continues, and a run
    with more prompts, variants or metrics only does the new work. The records are returned, dense first.
    """
    require_diffusers("tokenmerge evaluate")
    device = resolve_device(options.device)
    evaluation = plan_evaluation(options, device)
    kinds: tuple[type[QualityRecord | SampleRecord], ...] = (QualityRecord, SampleRecord)
    with ResultsFile(options.out, *kinds) as file:
        for note in file.notes:
            on_note(note)
        # All metrics are loaded before any image is drawn.
        wanted = options.wanted()
        check_count(wanted, len(evaluation.items), on_note)
        metrics = load_metrics(wanted, evaluation.prompts, on_note)
        return _Evaluating(options, evaluation, device, metrics, on_progress, on_note).run(file)


@dataclasses.dataclass
class _Evaluating:
    """One run on a device. ``operations`` has those of one call of the denoiser for each label."""

    options: EvaluateOptions
    evaluation: Evaluation
    device: torch.device
    metrics: Metrics
    on_progress: Callable[[Progress], None]
    on_note: Callable[[str], None]
    operations: dict[str, float] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self, file: ResultsFile[QualityRecord | SampleRecord]) -> list[QualityRecord]:
        """Draw the missing images, measure all, and write new records and samples."""
        evaluation = self.evaluation
        items = self.evaluation.items
        size = self.options.batch
        prepare_folder(evaluation.store.folder)
        conditions = evaluation.store.folder / "conditions.json"
        write_json(conditions, evaluation.store.conditions, CONTINUES, is_result=False)
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        # The variants take turns by batch, so that an interrupted run leaves complete batches.
        tasks = []
        for batch in batches:
            for variant in evaluation.variants:
                left = [item for item in batch if not evaluation.store.picture(variant, item).exists()]
                if left:
                    tasks.append((variant, left))
        if tasks:
            self._draw(tasks)
            free_memory()
            drawn = tuple(v for v in evaluation.variants if v.label not in self.left_out)
            evaluation = dataclasses.replace(evaluation, variants=drawn, left_out=self.left_out)
        self.metrics.to(self.device)
        measured = measure(batches, evaluation.variants, evaluation.store, self.metrics)
        records = quality_records(evaluation, self.metrics, measured, file.records)
        shown = [item for item in items if item.seed == self.options.seed][: self.options.samples]
        samples = sample_records(shown, evaluation.variants, evaluation.store)
        everything: list[QualityRecord | SampleRecord] = [*records, *samples]
        for record in everything:
            if file.records.get(record.key) != record:
                file.append(record)
        return records

    def _draw(self, tasks: Sequence[tuple[Variant, Sequence[Item]]]) -> None:
        """Draw, time and write images. An image appears on the disk only when it is complete."""
        evaluation = self.evaluation
        drawing = self.options.drawing(evaluation.prompts[0])
        pipe = load_pipeline_for(drawing, evaluation.source, evaluation.dtype, self.device)
        width, height = check_size(evaluation.size, latent_scale(pipe))
        call = PipelineCall.prepare(pipe, drawing, evaluation.size, frames=evaluation.frames)
        done = 0
        total = sum(len(items) for _, items in tasks)
        patches: dict[Variant, Any] = {}
        configs: dict[Variant, ToMeConfig | None] = {}
        self.on_progress(Progress("drawing", done, total))
        with Studio(pipe) as studio:
            for variant, items in tasks:
                done += len(items)
                if variant.label in self.left_out:
                    continue
                prompts = [item.prompt for item in items]
                seeds = [item.seed for item in items]
                steps = variant.steps(self.options.steps)
                batch_call = call.of_pictures(prompts, seeds).with_steps(steps)
                try:
                    if variant not in configs:
                        config = variant.config(
                            pipe, height=height, width=width, steps=steps, guidance=call.guidance
                        )
                        configs[variant] = config
                        patches[variant] = self._begin(studio, variant, config, batch_call)
                    seconds, images, cost = self._draw_batch(studio, variant, batch_call)
                except Exception as error:
                    if is_out_of_memory(error):
                        raise ConfigError(
                            f"batch: {len(items)} images at once do not fit into memory; lower --batch, "
                            "which changes images only by rounding; the finished ones are kept"
                        ) from error
                    if not self._leave_out(variant, error):
                        raise
                    continue
                # The default method knows all facts only when it runs.
                if isinstance(patches[variant], Patch):
                    configs[variant] = patches[variant].config
                for item, image in zip(items, images, strict=True):
                    about = (seconds, configs[variant], CONTINUES, cost)
                    evaluation.store.save(variant, item, image, *about)
                self.on_progress(Progress("drawing", done, total))

    def _draw_batch(
        self, studio: Studio, variant: Variant, call: PipelineCall
    ) -> tuple[float | None, list[Any], dict[str, float]]:
        """Draw, and return the seconds for each image, the images, and the other costs of each image."""
        name = variant.label
        seconds = None
        cost: dict[str, float] = {}
        if self.options.timed:
            (found,) = studio.rounds({name: call})
            seconds = found.seconds / len(found.pictures)
            images = found.pictures
            if found.peak_bytes is not None:
                cost["peak_bytes"] = float(found.peak_bytes)
        elif self._counts(variant):
            self.operations[name], images = studio.count(name, call)
        else:
            images = studio.draw(name, call)
        if name in self.operations:
            cost["counted"] = self.operations[DENSE] / self.operations[name]
        return seconds, images, cost

    def _counts(self, variant: Variant) -> bool:
        """Return whether the operations of a variant are known only after a run."""
        kind = VARIANTS[variant.name]
        return kind.is_faster and kind.method is None and self.options.attention in ("sdpa", "default")

    def _begin(self, studio: Studio, variant: Variant, config: ToMeConfig | None, call: PipelineCall) -> Any:
        """Apply a variant, and warm it up if it is timed. Return the patch, or None if the variant has none.

        Some rivals decide at run time what to skip, and their operations are counted in the warm-up. Without
        timing, there is none, and the operations are counted while each image is drawn.
        """
        name = variant.label
        counts = self._counts(variant)
        if missing := VARIANTS[variant.name].missing():
            raise UnsupportedModelError(missing)
        patch = None if name == DENSE else studio.add(name, partial(variant.apply, config=config))
        if counts and DENSE not in self.operations:
            self.operations[DENSE], _ = studio.count(DENSE, call.with_steps(1))
        if self.options.timed and counts:
            self.operations[name], _ = studio.count(name, call)
        elif self.options.timed:
            studio.warm_up(name, call)
        return patch

    def _leave_out(self, variant: Variant, error: Exception) -> bool:
        """Leave out a rival that does not run on this model, and say why."""
        name = variant.label
        is_ours = isinstance(error, TokenMergingError)
        if variant.name not in RIVALS or (is_ours and not isinstance(error, UnsupportedModelError)):
            return False
        self.left_out[name] = reason_of(error)
        self.operations.pop(name, None)
        self.on_note(f"{name} is left out: {self.left_out[name]}")
        return True
