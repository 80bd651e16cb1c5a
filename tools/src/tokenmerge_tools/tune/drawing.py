"""Draws one image at a time for ``tokenmerge tune``, and measures it."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge.errors import ConfigError, why
from tokenmerge_tools.drawing import Drawing, Studio
from tokenmerge_tools.evaluate.evaluation import Evaluation
from tokenmerge_tools.evaluate.metrics import Metrics
from tokenmerge_tools.evaluate.picture_store import CONTINUES
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for
from tokenmerge_tools.pipelines.loading import free_memory
from tokenmerge_tools.pipelines.settings import check_size
from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, Variant

if TYPE_CHECKING:
    from PIL.Image import Image

# PSNR of an image that equals dense in every pixel, instead of infinity, so that means stay finite.
_EQUAL = 100.0


class Easel:
    """A loaded pipeline that draws dense, with the default method, and in fewer steps."""

    def __init__(
        self, options: TuneOptions, evaluation: Evaluation, metrics: Metrics, device: torch.device
    ) -> None:
        self.steps = options.steps
        self.evaluation = evaluation
        self.metrics = metrics
        drawing = options.evaluation().drawing(evaluation.prompts[0])
        self.pipe = load_pipeline_for(drawing, evaluation.source, evaluation.dtype, device)
        width, height = check_size(evaluation.size, latent_scale(self.pipe))
        self.latent = height, width
        self.call = PipelineCall.prepare(self.pipe, drawing, evaluation.size)
        self.metrics.to(device)
        self._warm: set[Variant] = set()

    def draw(self, variant: Variant, item: int) -> dict[str, Any]:
        """Draw an image, store it, and return its measurements.

        These are its seconds, and with the default method also the estimate. If the default method cannot run
        here, a ConfigError is raised.
        """
        what = self.evaluation.items[item]
        call = self.call.of_pictures([what.prompt], [what.seed]).with_steps(variant.steps(self.steps))
        values: dict[str, Any] = {}
        with Studio(self.pipe) as studio, warnings.catch_warnings():
            # A warning that images are far from dense is not needed, since closeness is measured here.
            warnings.filterwarnings("ignore", message="speedup=")
            if variant.name in (DENSE, FEWER_STEPS):
                found = self._timed(studio, DENSE, variant, call)
            else:
                try:
                    patch = studio.add(variant.label, partial(variant.apply, config=None))
                    found = self._timed(studio, variant.label, variant, call)
                except Exception as error:
                    reason = "out of memory" if is_out_of_memory(error) else why(error)
                    raise ConfigError(
                        f"the default method cannot run here: {reason}; change --size, --steps, --dtype or "
                        "--model"
                    ) from error
                near = patch.estimate
                values["after"] = None if near is None or math.isinf(near.psnr) else near.psnr
        self.evaluation.store.save(variant, what, found.pictures[0], found.seconds, advice=CONTINUES)
        values["seconds"] = found.seconds
        if variant.name != DENSE:
            values["metrics"] = self.measure(variant, item)
        free_memory()
        return values

    def picture(self, variant: Variant, item: int) -> Image:
        """Return an image that was drawn."""
        return self.evaluation.store.frames(variant, self.evaluation.items[item])[0]

    def measure(self, variant: Variant, item: int) -> dict[str, float]:
        """Return the closeness of an image to the dense one."""
        prompts = [self.evaluation.items[item].prompt]
        images = [self.picture(variant, item)]
        dense = [self.picture(Variant(DENSE), item)]
        found = {}
        for metric in self.metrics.of_pictures:
            value = float(metric.measure(images, dense, prompts)[0])
            found[metric.name] = min(value, _EQUAL) if metric.name == "psnr" else value
        return found

    def _timed(self, studio: Studio, name: str, variant: Variant, call: PipelineCall) -> Drawing:
        """Draw and time one call.

        The first call of all is warmed up before. On an accelerator, so is the first call of each variant.
        """
        if variant not in self._warm and (not self._warm or self.pipe.device.type != "cpu"):
            studio.warm_up(name, call)
        self._warm.add(variant)
        (found,) = studio.rounds({name: call})
        return found
