"""Prepares cells to run: each gets its own copy of the denoiser with its variant applied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.report import Report, predict
from tokenmerge_tools.bench.grid import Cell, Setting
from tokenmerge_tools.bench.loaded_model import LoadedModel, example_inputs
from tokenmerge_tools.failures import Failure
from tokenmerge_tools.pipelines.loading import free_memory, shared_copy
from tokenmerge_tools.pipelines.settings import set_attention
from tokenmerge_tools.variants.variant import VARIANTS


class PreparedCell:
    """A cell that is ready to run. After its first failure, running it does nothing.

    One run calls the denoiser ``calls`` times, and the recorded time is the mean of these calls. A dense cell
    has no config and no report.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.calls = 1
        self.failure: Failure | None = None
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self.call: Callable[[], object] | None = None
        self.config: ToMeConfig | None = None
        self.report: Report | None = None

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
            self.call = None
            free_memory()

    def run(self) -> None:
        """Run the cell once, unless it failed before."""
        self.attempt(lambda: self.call and self.call())


class CellBuilder:
    """Prepares the cells of one setting on a loaded model.

    The variants stay applied until ``variants`` is closed. ``samples`` is the batch size of the denoiser.
    """

    def __init__(self, model: LoadedModel, setting: Setting, variants: contextlib.ExitStack) -> None:
        self.model = model
        self.setting = setting
        self.variants = variants
        self.samples = setting.batch * (2 if model.guided else 1)
        self.latent = setting.height // model.scale, setting.width // model.scale

    def prepare(self, cell: Cell) -> PreparedCell:
        """Apply the cell's variant to a copy of the denoiser. If that fails, the result has the failure."""
        prepared = PreparedCell(cell)
        prepared.attempt(partial(self._build, prepared, cell))
        return prepared

    def _build(self, prepared: PreparedCell, cell: Cell) -> None:
        if missing := VARIANTS[cell.spec.name].missing():
            raise ConfigError(missing)
        denoiser = shared_copy(self.model.denoiser)
        steps = self.setting.steps
        set_attention([denoiser], cell.attention)
        height, width = self.latent
        # at_step sets the step of a denoiser alone. A compiled model is one graph for all steps.
        config = cell.spec.config(
            denoiser, height=height, width=width, steps=steps, follows_steps=not cell.compile
        )
        prepared.config = config
        if config is not None:
            if cell.compile and config.follows_steps:
                raise ConfigError(
                    "compile: settings that follow the denoising steps cannot be compiled into one graph "
                    "with the model; leave --compile out, or take a method that is the same at every step"
                )
            if config.guided_planner:
                raise ConfigError(
                    f"planner={config.guided_planner!r} needs classifier-free guidance, which a pipeline "
                    "applies; tokenmerge evaluate times it"
                )
            prepared.report = predict(self.model.denoiser, config, *self.latent, self.samples, steps)
        patch = self.variants.enter_context(cell.spec.apply(denoiser, config))
        if cell.compile:
            # Otherwise torch would treat sizes that differ between cells as dynamic.
            denoiser.compile(dynamic=False)
        inputs = example_inputs(
            self.model.denoiser,
            self.latent,
            self.samples,
            seed=self.setting.seed,
            guided=self.model.guided,
            frames=self.setting.frames or 1,
        )

        def call() -> object:
            # Each call gets new tensors, as in a generation. Calls with the same sample tensor share plans.
            args, kwargs = tree_map_only(Tensor, torch.clone, inputs)
            with torch.no_grad():
                return denoiser(*args, **kwargs)

        # The calls of a generation differ in cost if the settings follow the steps.
        def generation() -> None:
            for index in range(steps):
                patch.at_step(index, steps)
                call()

        if config is not None and config.follows_steps:
            prepared.call = generation
            prepared.calls = steps
        else:
            prepared.call = call
            prepared.calls = 1


@contextlib.contextmanager
def compile_cache() -> Iterator[None]:
    """Clear compiled code, and allow more compiled versions of one function: each cell has its own."""
    import torch._dynamo.config as dynamo

    torch.compiler.reset()
    with dynamo.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        yield
    torch.compiler.reset()
