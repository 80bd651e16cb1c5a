"""A cell made ready to run: a copy of the model with its variant applied, and what became of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenmerge.bench.failures import Failure
from tokenmerge.bench.inputs import InputSize
from tokenmerge.bench.plan import Column
from tokenmerge.bench.subject import Subject, shared_copy
from tokenmerge.bench.variants import VARIANTS, VariantSpec
from tokenmerge.errors import ConfigError
from tokenmerge.pipeline_settings import set_attention
from tokenmerge.report import Report, predict

__all__ = ["Prepared", "Workbench", "compile_cache"]


class Prepared:
    """One cell's call, which after its first failure does nothing any more.

    Attributes:
        column: the cell.
        failure: why it has no figures; None while all is well.
        seconds: its timings so far.
        peak_bytes: most memory held in any of them.
    """

    def __init__(self, column: Column) -> None:
        self.column = column
        self.failure: Failure | None = None
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self.call: Callable[[], object] | None = None

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
        prepared = Prepared(column)

        def build() -> None:
            spec = column.spec
            if missing := VARIANTS[spec.name].missing():
                raise ConfigError(missing)
            model = shared_copy(self.subject.denoiser)
            set_attention([model], column.attention)
            variant = VARIANTS[spec.name].apply(model, spec.config(), self.report(spec))
            self.variants.enter_context(variant)
            # Static shapes: compiled for one cell, as a user would, not for what differs between cells.
            runs: Any = torch.compile(model, dynamic=False) if column.compile else model
            prepared.call = self.subject.bind(runs, self.size, steps or self.steps)

        prepared.attempt(build)
        return prepared

    def report(self, spec: VariantSpec) -> Report | None:
        """What merging does at this size; None for a variant without settings.

        Raises:
            NothingToMergeError, UnsupportedModelError: nothing would merge.
        """
        config = spec.config()
        if config is None:
            return None
        if config not in self._reports:
            self._reports[config] = predict(self.subject.denoiser, config, *self.size.latent, self.samples)
        return self._reports[config]


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
