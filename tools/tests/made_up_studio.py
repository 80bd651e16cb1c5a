"""An easel for ``tokenmerge tune`` whose times and closeness are made up instead of measured."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import StableDiffusionPipeline
from PIL import Image

from tokenmerge.plans import pays_from
from tokenmerge_tools.tune import drawing, runner
from tokenmerge_tools.tune.drawing import Easel
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, Variant

DENSE_SECONDS = 10.0


class MadeUp(Easel):
    """An easel that draws nothing.

    Attributes:
        drawn: (label, item) of every image, over all instances.
        stop: raised before the image of this number, and the number.
    """

    drawn: list[tuple[str, int]] = []  # noqa: RUF012
    stop: tuple[int, BaseException] | None = None

    def draw(self, variant: Variant, item: int) -> dict[str, Any]:
        if MadeUp.stop is not None and len(MadeUp.drawn) >= MadeUp.stop[0]:
            raise MadeUp.stop[1]
        MadeUp.drawn.append((variant.label, item))
        path = self.evaluation.store.picture(variant, self.evaluation.items[item])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", self.evaluation.size).save(path)
        if variant.name == DENSE:
            return {"seconds": DENSE_SECONDS}
        if variant.name == FEWER_STEPS:
            return {"seconds": DENSE_SECONDS * variant.steps(20) / 20, "metrics": {"psnr": 20.0 + item % 2}}
        speedup = dict(variant.settings)["speedup"]
        psnr = closeness(speedup, item)
        return {"seconds": DENSE_SECONDS / speedup, "metrics": {"psnr": psnr}, "after": psnr - 4.0}


def closeness(speedup: float, item: int) -> float:
    """How close an image is: 35 dB at a speed-up of 2 in the mean."""
    return max(55.0 - 10.0 * speedup, 5.0) + item % 2


def install(monkeypatch: pytest.MonkeyPatch, pipe: StableDiffusionPipeline) -> type[MadeUp]:
    """Replace the real easel by the one that draws nothing, and every model by this pipeline."""
    monkeypatch.setattr(MadeUp, "drawn", [])
    monkeypatch.setattr(MadeUp, "stop", None)
    monkeypatch.setattr(runner, "Easel", MadeUp)
    monkeypatch.setattr(drawing, "load_pipeline_for", lambda *_: pipe)
    # The source may change while the tests run.
    monkeypatch.setattr("tokenmerge_tools.evaluate.evaluation.source_commit", lambda: None)
    # A device on which merging saves time on every grid; here a tiny one need not.
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(4))
    return MadeUp
