"""Runs ``tokenmerge tune``: draws what is missing, and knows what was drawn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from tokenmerge.config import EstimateErrors, FoundFor, Tuned
from tokenmerge.default_method import DefaultMethod
from tokenmerge.errors import ConfigError
from tokenmerge.models.find import find_hosts
from tokenmerge.models.weights import fingerprint
from tokenmerge.plans import ROUNDING, RunFacts, plan_for
from tokenmerge.plans.estimate import MOST_PSNR, psnr_of
from tokenmerge.plans.learned import Measured, learn
from tokenmerge_tools.drawing import Progress
from tokenmerge_tools.evaluate.evaluation import plan_evaluation
from tokenmerge_tools.evaluate.metrics import load_metrics
from tokenmerge_tools.files import prepare_folder
from tokenmerge_tools.pipelines.loading import denoiser_of, require_diffusers
from tokenmerge_tools.pipelines.settings import resolve_device
from tokenmerge_tools.records.file import ResultsFile
from tokenmerge_tools.records.kinds import TuneRecord, fewest_tokens_of, key_of
from tokenmerge_tools.tune.drawing import Easel
from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.tune.speeds import Closeness, closeness_of, fastest, is_kept, speeds_of
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, Variant

_SPEEDS_AT_MOST = 4  # the bisection draws no more; this is for the progress bar


def tune(
    options: TuneOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Tuning:
    """Find or measure a speed, until it is done or the user presses Ctrl-C.

    Every image is written to the results file at once. The same command continues, and another goal reuses
    the images.
    """
    require_diffusers("tokenmerge tune")
    device = resolve_device(options.device)
    wanted = options.evaluation(prompts=len(options.evaluation().read_prompts()))
    evaluation = plan_evaluation(wanted, device)
    items = tuple(sorted(evaluation.items, key=lambda item: item.seed)[: options.items])
    evaluation = dataclasses.replace(evaluation, items=items)
    metrics = load_metrics(wanted.wanted(), evaluation.prompts, on_note)
    prepare_folder(evaluation.store.folder)
    with ResultsFile(options.records, TuneRecord) as file:
        for note in file.notes:
            on_note(note)
        tuning = Tuning(options, Easel(options, evaluation, metrics, device), file, on_progress)
        with contextlib.suppress(KeyboardInterrupt):
            tuning.run()
            tuning.complete = True
        return tuning


class Tuning:
    """What was drawn so far, and what it says.

    ``images`` has the values of each image, by the label of its variant and the number of its prompt.
    ``answer`` is the speed that was found or measured, or None if no speed keeps the goal. ``complete`` says
    whether everything was drawn.
    """

    def __init__(
        self,
        options: TuneOptions,
        easel: Easel,
        file: ResultsFile[TuneRecord],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.options = options
        self.easel = easel
        self.file = file
        self.on_progress = on_progress
        self.evaluation = easel.evaluation
        texts = [f"{item.prompt}, seed {item.seed}" for item in self.evaluation.items]
        self.conditions = key_of({"conditions": self.evaluation.store.conditions, "items": texts})
        records = [one for one in file.records.values() if one.conditions == self.conditions]
        self.images = {(one.name, one.item): one.values for one in records if one.about == "image"}
        self.facts = self._facts(records)
        self.answer: float | None = None
        self.complete = False

    @property
    def speeds(self) -> list[float]:
        """The requested speeds that all prompts were drawn with, in ascending order."""
        found = {float(name.partition("=")[2]) for name, _ in self.images if name.startswith("auto ")}
        return sorted(speed for speed in found if self.is_drawn(speed))

    @property
    def reaches(self) -> bool:
        """Whether the goal is kept, or the speed can be reached by operations."""
        if self.options.speedup is None:
            return self.answer is not None
        return plan_for(self.facts, self.options.speedup).speedup + ROUNDING >= self.options.speedup

    def is_drawn(self, speedup: float) -> bool:
        """Return whether all prompts were drawn with a speed."""
        label = variant_of(speedup).label
        return all((label, item) in self.images for item in range(self.options.items))

    def run(self) -> None:
        """Draw until the answer is known."""
        if self.options.speedup is not None:
            self._keeps(self.options.speedup)
            return
        speeds = speeds_of(self.facts)
        if not speeds:
            raise ConfigError(
                "size: no plan merges tokens or reuses steps of this model at this size and number of steps; "
                "raise --size or --steps"
            )
        fastest(speeds, self._keeps)

    def closeness(self, label: str, metric: str | None = None) -> Closeness:
        """Return how close the images of a variant are in a metric, which is by default that of the goal."""
        name = metric or self.options.metric
        values = [self.images[label, item]["metrics"][name] for item in range(self.options.items)]
        return closeness_of(values, name)

    def by_operations(self, speedup: float) -> float:
        """Return the speed-up by operations when this speed is requested."""
        return plan_for(self.facts, speedup).speedup

    def by_clock(self, label: str) -> float:
        """Return the speed-up by the clock of a variant: the median over the prompts."""
        return median(
            self.images[DENSE, item]["seconds"] / self.images[label, item]["seconds"]
            for item in range(self.options.items)
        )

    def fewer(self, speedup: float) -> Variant | None:
        """Return dense in as many steps as take the time of a speed, or None if that takes all steps."""
        steps = max(1, round(self.options.steps / self.by_clock(variant_of(speedup).label)))
        return Variant(FEWER_STEPS, (("steps", steps),)) if steps < self.options.steps else None

    def tuned(self) -> Tuned:
        """Return the content of the file. If no speed keeps the goal, its speed is 1, that of dense."""
        easel = self.easel
        denoiser = denoiser_of(easel.pipe)
        found_for = FoundFor(
            type(denoiser).__name__,
            *easel.latent,
            self.options.steps,
            type(easel.pipe.scheduler).__name__,
            easel.call.guidance,
            fingerprint(denoiser),
        )
        return Tuned(self.answer or 1.0, found_for, self.errors())

    def errors(self) -> EstimateErrors:
        """Return how far the estimates were off."""
        found = []
        for speed in self.speeds:
            plan = plan_for(self.facts, speed)
            before = psnr_of(plan.expected_error)
            for item in range(self.options.items):
                values = self.images[variant_of(speed).label, item]
                true = min(values["metrics"]["psnr"], MOST_PSNR)
                after = values.get("after")
                found.append(Measured(item, plan.speedup, true, before, before if after is None else after))
        return learn(found)

    def _keeps(self, speedup: float) -> bool:
        """Draw all prompts with a speed and in fewer steps, and return whether it keeps the goal."""
        variant = variant_of(speedup)
        for item in range(self.options.items):
            self._draw(Variant(DENSE), item)
            self._draw(variant, item)
        kept = True
        if self.options.goal is not None:
            kept = is_kept(self.closeness(variant.label), self.options.goal, self.options.metric)
        if kept and speedup > (self.answer or 0):
            self.answer = speedup
        fewer = self.fewer(speedup)
        for item in range(self.options.items if fewer else 0):
            assert fewer is not None
            self._draw(fewer, item)
        return kept

    def _draw(self, variant: Variant, item: int) -> None:
        """Draw an image unless it exists already."""
        speeds = _SPEEDS_AT_MOST if self.options.speedup is None else 1
        total = self.options.items * (1 + 2 * speeds)
        self.on_progress(Progress("drawing", min(len(self.images), total), total))
        there = (variant.label, item) in self.images
        if there and self.evaluation.store.picture(variant, self.evaluation.items[item]).exists():
            return
        values = self.easel.draw(variant, item)
        self._append("image", variant.label, item, values)
        self.images[variant.label, item] = values

    def _facts(self, records: list[TuneRecord]) -> RunFacts:
        """Return the facts of the generation. Measurements of an earlier run are used again."""
        hosts = find_hosts(self.easel.pipe)
        height, width = self.easel.latent
        method = DefaultMethod.of(self.easel.pipe, hosts, self.options.speedup or 2.0)
        denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
        measured = [one.values for one in records if one.about == "facts"]
        if not measured:
            measured = [self._append("facts", "", -1, {"fewest_tokens": method.facts.fewest_tokens}).values]
        return dataclasses.replace(
            method.facts,
            grid=denoiser.grid_at(height, width),
            steps=self.options.steps,
            guidance=self.easel.call.guidance,
            fewest_tokens=fewest_tokens_of(measured[-1]),
        )

    def _append(self, about: str, name: str, item: int, values: Mapping[str, Any]) -> TuneRecord:
        record = TuneRecord(conditions=self.conditions, about=about, name=name, item=item, values=values)
        self.file.append(record)
        return record


def variant_of(speedup: float) -> Variant:
    """Return the default method with a speed as a variant, which draws and stores images."""
    return Variant("auto", (("speedup", speedup),))
