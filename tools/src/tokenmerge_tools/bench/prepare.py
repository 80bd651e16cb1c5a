"""Prepares cells to run: each gets its own copy of the model with its variant applied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.report import Report, predict
from tokenmerge_tools.bench.cells import Cell, Setting
from tokenmerge_tools.bench.inputs import InputSize
from tokenmerge_tools.bench.loaded_model import LoadedModel
from tokenmerge_tools.failures import Failure
from tokenmerge_tools.method_spec import check_compile
from tokenmerge_tools.pipelines.counting import counting
from tokenmerge_tools.pipelines.loading import free_memory, shared_copy
from tokenmerge_tools.pipelines.settings import set_attention
from tokenmerge_tools.variants.variant import FEWER_STEPS, VARIANTS, Variant


class PreparedCell:
    """A cell that is ready to run. After its first failure, running it does nothing.

    ``calls`` is the number of calls of the denoiser in one run; the recorded time is their mean. ``config``
    and ``report`` are None for a variant without settings. ``flops`` is the mean number of operations of the
    denoiser's calls in one run, None if they were not counted in a run.
    """

    def __init__(self, cell: Cell, steps: int) -> None:
        self.cell, self.steps, self.calls = cell, steps, 1
        self.failure: Failure | None = None
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self.call: Callable[[], object] | None = None
        self.config: ToMeConfig | None = None
        self.report: Report | None = None
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

    The variants stay applied until ``variants`` is closed. ``samples`` is the batch size of the denoiser.
    """

    def __init__(self, model: LoadedModel, setting: Setting, variants: contextlib.ExitStack) -> None:
        self.model, self.steps, self.variants = model, setting.steps, variants
        self.samples = setting.batch * (2 if model.guided else 1)
        in_call = self.samples if model.alone else setting.batch
        self.size = InputSize(setting.height, setting.width, model.scale, in_call, setting.frames or 1)
        self._reports: dict[ToMeConfig, Report] = {}

    def prepare(self, cell: Cell) -> PreparedCell:
        """Apply the cell's variant to a copy of the model. If that fails, the result has the failure."""
        prepared = PreparedCell(cell, self.steps)
        prepared.attempt(partial(self._build, prepared, cell))
        return prepared

    def _build(self, prepared: PreparedCell, cell: Cell) -> None:
        model = self.model
        if missing := VARIANTS[cell.spec.name].missing():
            raise ConfigError(missing)
        denoiser = prepared.denoiser = shared_copy(model.denoiser)
        set_attention([denoiser], cell.attention)
        whole = model.whole(denoiser)
        # at_step sets the step of a denoiser alone. A compiled model is one graph for all steps.
        config = prepared.config = self._config(cell.spec, whole, follows_steps=not cell.compile)
        if config is not None:
            if cell.compile:
                check_compile(config)
            if model.alone and config.asks_guidance:
                raise ConfigError(
                    f"planner={config.guided_planner!r} needs classifier-free guidance, which the pipeline "
                    "applies; use --scope pipeline"
                )
            prepared.report = self._report(config)
        if cell.merged is not None:
            prepared.steps = self._fewer_steps(cell.merged, whole)
        patch = self.variants.enter_context(cell.spec.apply(whole, config))
        if cell.compile:
            # Otherwise torch would treat sizes that differ between cells as dynamic.
            denoiser.compile(dynamic=False)
        call = model.bind(whole, self.size, prepared.steps)
        steps = self.steps

        def generation() -> None:  # whose calls differ in cost
            for index in range(steps):
                patch.at_step(index, steps)
                call()

        prepared.call = call
        if model.alone and config is not None and config.follows_steps:
            prepared.call, prepared.calls = generation, steps

    def _config(self, spec: Variant, whole: object, follows_steps: bool | None = None) -> ToMeConfig | None:
        height, width = self.size.latent
        return spec.config(
            whole,
            height=height,
            width=width,
            steps=self.steps,
            guidance=self.model.guidance,
            follows_steps=follows_steps,
        )

    def _report(self, config: ToMeConfig) -> Report:
        if config not in self._reports:
            size = (*self.size.latent, self.samples, self.steps)
            self._reports[config] = predict(self.model.denoiser, config, *size)
        return self._reports[config]

    def _fewer_steps(self, merged: Variant, whole: object) -> int:
        """Return the number of dense steps with as many counted operations as a variant."""
        if self.model.alone:
            raise ConfigError(f"{FEWER_STEPS} needs the denoising steps of a pipeline; use --scope pipeline")
        config = self._config(merged, whole)
        if config is None:
            raise ConfigError(f"the operations of {merged.label} are not counted before it runs")
        report = self._report(config)
        counted = report.flops_merged if report.flops_mean is None else report.flops_mean
        return max(1, round(self.steps * counted / report.flops_dense))


@contextlib.contextmanager
def compile_cache() -> Iterator[None]:
    """Clear compiled code, and raise torch's limit on compiled versions of one function.

    Each cell has a version of its own. Beyond the limit, 8 by default, torch runs uncompiled code without a
    warning.
    """
    import torch._dynamo.config as dynamo

    torch.compiler.reset()
    with dynamo.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        yield
    torch.compiler.reset()
