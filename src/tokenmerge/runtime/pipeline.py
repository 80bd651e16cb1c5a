"""What merging asks of the pipeline that a model is part of."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from tokenmerge.runtime.step_tracker import Moment, moment_of

__all__ = ["Pipeline"]

# Their batches are the picture guided by text and image, by the image alone, and by nothing.
_GUIDED_TWICE = ("StableDiffusionInstructPix2PixPipeline", "StableDiffusionXLInstructPix2PixPipeline")


class Pipeline:
    """A pipeline, or none; copies and pickles of a model are part of none.

    Attributes:
        told: the step of a loop that is not a pipeline's.
        runs: of all its models, which take part in the same generations.
    """

    def __init__(self, pipe: object = None) -> None:
        self.told: Moment | None = None
        self.runs: list[Any] = []
        self._latest: Moment | None = None
        try:
            self._reference = None if pipe is None else weakref.ref(pipe)
        except TypeError:  # a plain namespace with models in it
            self._reference = None

    @property
    def parts(self) -> int:
        """How many times a batch holds each sample, if the pipeline batches what guidance compares."""
        pipe: Any = None if self._reference is None else self._reference()
        # Not all of them tell; then a batch that is twice the same is taken for a guided one.
        guided = bool(getattr(pipe, "do_classifier_free_guidance", pipe is not None))
        perturbed = bool(getattr(pipe, "do_perturbed_attention_guidance", False))
        twice = guided and any(cls.__name__ in _GUIDED_TWICE for cls in type(pipe).__mro__)
        return 1 + guided + perturbed + twice

    def moment(self, timestep: Tensor | float) -> Moment | None:
        """The denoising step of a call of the model with this timestep; None: nothing says which it is."""
        pipe: Any = None if self._reference is None else self._reference()
        moment = self.told or moment_of(getattr(pipe, "scheduler", None), timestep)
        if moment is not None:
            # Of all models together: a second transformer does not begin a generation where it takes over.
            moment = self._latest = moment.after(self._latest)
        return moment

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        return Pipeline()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pipeline, ()
