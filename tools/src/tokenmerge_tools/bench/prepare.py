"""Prepares cells to run: each gets its own copy of the model with its variant applied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tokenmerge.api import Patch
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.report import Report, counting, predict
from tokenmerge_tools.bench.cells import Cell
from tokenmerge_tools.bench.inputs import InputSize
from tokenmerge_tools.bench.loaded_model import LoadedModel
from tokenmerge_tools.failures import Failure
from tokenmerge_tools.method_spec import check_compile
from tokenmerge_tools.pipelines.loading import free_memory, shared_copy
from tokenmerge_tools.pipelines.settings import set_attention
from tokenmerge_tools.variants.variant import VARIANTS


class PreparedCell:
    """A cell that is ready to run. After its first failure, running it does nothing.

    ``peak_bytes`` is the peak over all timed calls, None if it cannot be read. ``calls`` is the number of
    calls of the denoiser in one run; the recorded time is their mean. ``config`` and ``report`` are None for
    a variant without settings. ``flops`` is the mean number of operations of the denoiser's calls in one run,
    None if they were not counted in a run.
    """

    def __init__(self, cell: Cell, steps: int) -> None:
        self.cell, self.steps = cell, steps
        self.failure: Failure | None = None
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self.call: Callable[[], object] | None = None
        self.config: ToMeConfig | None = None
        self.report: Report | None = None
        self.calls = 1
        self.denoiser: nn.Module | None = None
        self.flops: int | None = None

    def add(self, seconds: float, peak_bytes: int | None) -> None:
        """Add a timed call."""
        self.seconds.append(seconds)
        self.peak_bytes = max(self.peak_bytes or 0, peak_bytes or 0) or None

    def is_finished(self, rounds: int) -> bool:
        """Return whether the cell failed or was timed in all rounds."""
        return self.failure is not None or len(self.seconds) == rounds

    def attempt(self, action: Callable[[], object]) -> None:
        """Run an action for this cell unless it failed before. If the action fails, keep the failure."""
        if self.failure is None:
            try:
                action()
            except Exception as error:
                self.failure = Failure.of(error)
        if self.failure is not None and self.call is not None:
            self.call = self.denoiser = None
            free_memory()

    def run(self) -> None:
        """Run the cell once, unless it failed before."""
        self.attempt(lambda: self.call and self.call())

    def run_counted(self) -> None:
        """Run the cell once, unless it failed before, and count its operations if that is possible.

        PyTorch cannot count the operations of compiled models, or of attention kernels that are not its own.
        """
        if self.denoiser is None or self.cell.compile or self.cell.attention not in ("sdpa", "default"):
            return self.run()
        with counting(self.denoiser) as counted:
            self.run()
        self.flops = counted.flops // counted.calls if counted.flops else None


class CellBuilder:
    """Prepares the cells of one setting on a loaded model.

    The variants stay applied until ``variants`` is closed. ``samples`` is the batch size of the denoiser, and
    ``steps`` the number of denoising steps of a whole pipeline.
    """

    def __init__(
        self, model: LoadedModel, size: InputSize, samples: int, steps: int, variants: contextlib.ExitStack
    ) -> None:
        self.model, self.size, self.samples, self.steps = model, size, samples, steps
        self.variants = variants
        self._reports: dict[object, Report] = {}

    def prepare(self, cell: Cell, steps: int | None = None) -> PreparedCell:
        """Apply the cell's variant to a copy of the model. If that fails, the result has the failure.

        The number of denoising steps is that of the setting, unless it is given.
        """
        prepared = PreparedCell(cell, steps or self.steps)

        def build() -> None:
            variant = VARIANTS[cell.spec.name]
            if missing := variant.missing():
                raise ConfigError(missing)
            denoiser = prepared.denoiser = shared_copy(self.model.denoiser)
            set_attention([denoiser], cell.attention)
            whole = self.model.whole(denoiser)
            # at_step sets the step of a denoiser alone. A compiled model is one graph for all steps.
            config = prepared.config = cell.spec.config(whole, follows_steps=not cell.compile)
            if config is not None:
                self._check(config, cell)
                prepared.report = self._report(config)
            applied = cell.spec.apply(whole, config, prepared.report)
            patch = self.variants.enter_context(applied)
            if cell.compile:
                # Otherwise torch would treat sizes that differ between cells as dynamic.
                denoiser.compile(dynamic=False)
            call = self.model.bind(whole, self.size, prepared.steps)
            if self.model.alone and config is not None and config.follows_steps:
                call, prepared.calls = _whole_generation(call, patch, self.steps), self.steps
            prepared.call = call

        prepared.attempt(build)
        return prepared

    def _check(self, config: ToMeConfig, cell: Cell) -> None:
        if cell.compile:
            check_compile(config)
        if self.model.alone and config.asks_guidance:
            raise ConfigError(
                f"planner={config.guided_planner!r} needs classifier-free guidance, which the pipeline "
                "applies; use --scope pipeline"
            )

    def _report(self, config: ToMeConfig) -> Report:
        """Return the report of a configuration at this size and guidance, made once."""
        if config not in self._reports:
            in_force = config.at_guidance(self.model.guidance)
            self._reports[config] = predict(
                self.model.denoiser, in_force, *self.size.latent, self.samples, self.steps
            )
        return self._reports[config]


def _whole_generation(call: Callable[[], object], patch: Patch[Any, Any], steps: int) -> Callable[[], object]:
    """Return a function that makes all calls of one generation, because their costs differ."""

    def generation() -> None:
        for index in range(steps):
            patch.at_step(index, steps)
            call()

    return generation


@contextlib.contextmanager
def compile_cache() -> Iterator[None]:
    """Clear compiled code, and raise torch's limit on compiled versions of one function.

    Each cell has a version of its own. Beyond the limit, 8 by default, torch runs uncompiled code without a
    warning.
    """
    import torch._dynamo.config as dynamo

    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    torch.compiler.reset()
    with dynamo.patch({limit: 1024, f"accumulated_{limit}": 4096}):
        yield
    torch.compiler.reset()
