"""A cell made ready to run: a copy of the model with its variant applied, and what became of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenmerge.api import Patch
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.failures import Failure
from tokenmerge.measure.bench.inputs import InputSize
from tokenmerge.measure.bench.loaded_model import Subject, shared_copy
from tokenmerge.measure.bench.plan import Column
from tokenmerge.measure.bench.variants import VARIANTS
from tokenmerge.measure.pipelines.settings import set_attention
from tokenmerge.report import Report, predict

__all__ = ["Prepared", "Workbench", "compile_cache"]


class Prepared:
    """One cell's call, which after its first failure does nothing any more.

    Attributes:
        column: the cell.
        failure: why it has no figures; None while all is well.
        seconds: its timings so far.
        peak_bytes: most memory held in any of them.
        config: the settings of its variant, if it has any.
        report: what merging does with them at the size at hand.
        calls: how many calls, of which the mean is told, one run makes.
        steps: denoising steps of a whole pipeline.
    """

    def __init__(self, column: Column, steps: int) -> None:
        self.column, self.steps = column, steps
        self.failure: Failure | None = None
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self.call: Callable[[], object] | None = None
        self.config: ToMeConfig | None = None
        self.report: Report | None = None
        self.calls = 1

    def add(self, seconds: float, peak_bytes: int | None) -> None:
        """Add a timed call."""
        self.seconds.append(seconds)
        self.peak_bytes = max(self.peak_bytes or 0, peak_bytes or 0) or None

    def attempt(self, action: Callable[[], object]) -> None:
        """Do something for this cell, and note down if it fails."""
        if self.failure is None:
            try:
                action()
            except Exception as error:
                self.failure = Failure.of(error)
        if self.failure is not None and self.call is not None:
            self.call = None
            free_memory()

    def run(self) -> None:
        """Call it once, unless it failed before."""
        self.attempt(lambda: self.call and self.call())


class Workbench:
    """Prepares the cells of one setting on a loaded model.

    Args:
        subject: the model.
        size: of one call.
        samples: rows that the denoiser sees in one call.
        steps: denoising steps of a whole pipeline.
        variants: keeps the variants in force until it is closed.
    """

    def __init__(
        self, subject: Subject, size: InputSize, samples: int, steps: int, variants: contextlib.ExitStack
    ) -> None:
        self.subject, self.size, self.samples, self.steps = subject, size, samples, steps
        self.variants = variants
        self._reports: dict[object, Report] = {}

    def prepare(self, column: Column, steps: int | None = None) -> Prepared:
        """Apply the cell's variant to a copy of the model; what cannot be done is noted in what is returned.

        Args:
            column: the cell.
            steps: denoising steps, if they are not those of the setting.
        """
        prepared = Prepared(column, steps or self.steps)

        def build() -> None:
            variant = VARIANTS[column.spec.name]
            if missing := variant.missing():
                raise ConfigError(missing)
            model = shared_copy(self.subject.denoiser)
            set_attention([model], column.attention)
            whole = self.subject.whole(model)
            # A denoiser alone is told its steps; in one graph with the whole model nothing follows them.
            config = prepared.config = column.spec.config(whole, follows_steps=not column.compile)
            if config is not None:
                self._check(config, column)
                prepared.report = self._report(config)
            applied = column.spec.apply(whole if variant.of_pipeline else model, config, prepared.report)
            patch = self.variants.enter_context(applied)
            if column.compile:
                # Static shapes: compiled for one cell, as a user would, not for what differs between cells.
                model.compile(dynamic=False)
            call = self.subject.bind(whole, self.size, prepared.steps)
            if self.subject.alone and config is not None and config.follows_steps:
                call, prepared.calls = _whole_generation(call, patch, self.steps), self.steps
            prepared.call = call

        prepared.attempt(build)
        return prepared

    def _check(self, config: ToMeConfig, column: Column) -> None:
        if column.compile and config.follows_steps:
            raise ConfigError(
                "settings that follow the denoising steps cannot be compiled into one graph with the model"
            )
        if self.subject.alone and config.asks_guidance:
            raise ConfigError(
                f"planner={config.guided_planner!r} looks at what guidance changed, and guidance is the "
                "pipeline's; take --scope pipeline"
            )

    def _report(self, config: ToMeConfig) -> Report:
        """What merging does at this size, counted once."""
        if config not in self._reports:
            self._reports[config] = predict(
                self.subject.denoiser, config, *self.size.latent, self.samples, self.steps
            )
        return self._reports[config]


def _whole_generation(call: Callable[[], object], patch: Patch[Any, Any], steps: int) -> Callable[[], object]:
    """All calls of a denoiser that a generation makes, some of which cost more than others."""

    def generation() -> None:
        for index in range(steps):
            patch.at_step(index, steps)
            call()

    return generation


@contextlib.contextmanager
def compile_cache() -> Iterator[None]:
    """Start with nothing compiled, and let each of many cells have its own version of the same code.

    Beyond a limit, eight by default, torch runs uncompiled without saying so.
    """
    import torch._dynamo.config as dynamo

    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    torch.compiler.reset()
    with dynamo.patch({limit: 1024, f"accumulated_{limit}": 4096}):
        yield
    torch.compiler.reset()


def free_memory() -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
