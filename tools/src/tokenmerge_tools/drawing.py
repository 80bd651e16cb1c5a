"""Draws with a pipeline, dense and with variants on the same weights, and times each call.

``generate``, ``evaluate``, ``tune`` and the playground draw here. They differ in which variants, prompts and
rounds they ask for, and in what they do with the images.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError, TokenMergingError, reason_of
from tokenmerge.handle import RecordedPlan
from tokenmerge.report import Report, predict
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, own_size
from tokenmerge_tools.pipelines.counting import counting
from tokenmerge_tools.pipelines.loading import denoiser_of, twin
from tokenmerge_tools.pipelines.meta_model import cannot_draw
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import check_size
from tokenmerge_tools.timing import Measurement, interleaved
from tokenmerge_tools.variants.variant import DENSE

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

# These are enough steps for a dense one and one that merges, so that neither runs for the first time in a
# timed call. For fewer steps, cache-dit has no steps mask.
_WARM_UP_STEPS = 4
NOTHING_MERGED = "nothing was merged"  # the text for an image whose tokens did not merge


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of one part of a run, such as ``"dense"`` or ``"drawing"``."""

    part: str
    done: int
    total: int


def as_long_as(steps: int, share_of_time: float, speedup: float) -> int | None:
    """Return how many dense steps take at least as long as a faster image, or None if all steps are needed.

    ``share_of_time`` is the time of the faster image over that of the dense one. Its ``speedup`` by
    operations sets a lower limit, since a time can be too short by chance.

    >>> as_long_as(20, 0.52, 2.0), as_long_as(20, 0.4, 2.0), as_long_as(4, 0.9, 1.0)
    (11, 10, None)
    """
    fewer = max(1, math.ceil(steps * share_of_time), round(steps / speedup))
    return fewer if fewer < steps else None


@dataclasses.dataclass(frozen=True)
class Drawing(Measurement):
    """One timed call, with an image or a video for each of its seeds."""

    pictures: list[Any]


class Studio(contextlib.ExitStack):
    """A dense pipeline, and copies of it on the same weights with a variant applied to each.

    The variants are removed when the context ends. ``on_step`` is called after each denoising step, with the
    name of the copy and the number of steps of the call. An error in it ends the call.
    """

    def __init__(
        self, pipe: DiffusionPipeline, on_step: Callable[[str, int], None] = lambda name, steps: None
    ) -> None:
        super().__init__()
        self.pipes = {DENSE: pipe}
        self.on_step = on_step

    def add(
        self, name: str, apply: Callable[[DiffusionPipeline], contextlib.AbstractContextManager[Any]]
    ) -> Any:
        """Apply a variant to a new copy of the pipeline, and return what its context yields."""
        copied = twin(self.pipes[DENSE])
        patch = self.enter_context(apply(copied))
        self.pipes[name] = copied
        return patch

    def warm_up(self, name: str, call: PipelineCall) -> None:
        """Run a few untimed steps, so that kernels are loaded and chosen before a timed call."""
        steps = min(_WARM_UP_STEPS, call.arguments["num_inference_steps"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that so few steps save nothing
            self.draw(name, call.with_steps(steps), f"{name}: warming up")

    def count(self, name: str, call: PipelineCall) -> tuple[float, list[Any]]:
        """Draw once, and return the mean operations of a call of the denoiser, and the images."""
        with counting(denoiser_of(self.pipes[name])) as counted:
            images = self.draw(name, call, f"{name}: counting")
        return counted.flops / max(counted.calls, 1), images

    def draw(self, name: str, call: PipelineCall, doing: str = "") -> list[Any]:
        """Draw with one copy, or with the dense pipeline, whose errors name the model.

        ``on_step`` receives the name, or the text ``doing`` if there is one.
        """
        of_step: list[Exception] = []

        def on_step(steps: int) -> None:
            try:
                self.on_step(doing or name, steps)
            except Exception as error:
                of_step.append(error)
                raise

        try:
            return call(self.pipes[name], on_step)
        except TokenMergingError:
            raise
        except Exception as error:
            if name != DENSE or error in of_step or is_out_of_memory(error):
                raise
            model = type(self.pipes[DENSE]).__name__
            reason = reason_of(error)
            if "divisible by" in reason:
                raise cannot_draw(model, reason) from error
            raise ConfigError(
                f"model: {model} cannot draw, without merging too: {reason}; check the files of the model "
                "and the options"
            ) from error

    def rounds(self, calls: Mapping[str, PipelineCall], repeat: int = 1) -> Iterator[Drawing]:
        """Draw and time interleaved calls, and yield each one as soon as it is done."""
        drawn: dict[str, list[Any]] = {}

        def run(name: str) -> None:
            drawn[name] = self.draw(name, calls[name])

        runs = {name: partial(run, name) for name in calls}
        for timed in interleaved(runs, repeat, self.pipes[DENSE].device):
            yield Drawing(**vars(timed), pictures=drawn[timed.variant])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call of a pipeline, made from options, and a prediction of what merging does in it.

    The options have the size that is drawn, and ``latent`` is its (height, width) in latents.
    """

    options: GenerateOptions
    call: PipelineCall
    config: ToMeConfig
    report: Report
    latent: tuple[int, int]


def prepare(pipe: DiffusionPipeline, options: GenerateOptions, control: Image | None = None) -> Prepared:
    """Prepare to draw by these options, and predict what merging saves. Nothing runs."""
    size = options.size or own_size(pipe)
    width, height = check_size(size, latent_scale(pipe))
    call = PipelineCall.prepare(pipe, options, size, control)
    config = options.merging.config(
        pipe, height=height, width=width, steps=options.steps, guidance=call.guidance
    )
    samples = options.batch * (2 if call.guided else 1)
    report = predict(pipe, config, height, width, samples, options.steps)
    return Prepared(dataclasses.replace(options, size=size), call, config, report, (height, width))


def merged_groups(plans: Mapping[str, RecordedPlan], index: int, batch: int) -> tuple[NDArray[np.int64], str]:
    """Return the groups of merged tokens [h, w] on the image ``index``, and a text about them.

    They are those of the last block among the blocks with the most tokens.
    """
    if not plans:
        return np.zeros((1, 1), dtype=np.int64), NOTHING_MERGED
    path, recorded = max(reversed(list(plans.items())), key=lambda item: math.prod(item[1].grid))
    labels = recorded.plan.labels()
    # With guidance, the samples with the prompt are the last ones of the batch.
    row = max(0, labels.shape[0] - batch + index)
    of_image = labels[row, : math.prod(recorded.grid)]  # the tokens of reference images follow
    grid = of_image.reshape(recorded.grid[1:]).cpu().numpy()
    return grid, f"{grid.size} to {len(np.unique(grid))} tokens in {path.partition('.attentions')[0]}"
