"""Step reuse: denoising steps that skip a part of the model."""

from __future__ import annotations

import dataclasses

from tokenmerge.config.checks import check_fields, integer, number, refuse, share
from tokenmerge.config.value import Value

__all__ = ["StepReuse"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StepReuse(Value):
    """Step reuse: on some denoising steps a part of the model is skipped and its cached output is reused.

    Of a UNet, the deep stages are skipped: everything below its finest level (as in DeepCache, arXiv
    2312.00858). Of other models, the blocks that can run on merged tokens as a whole are. A skipped output is
    linearly extrapolated from the last two steps that computed it (arXiv 2503.06923, order 1), less so where
    it did not follow a line before. The cache holds two outputs of each skipped part.

    diffusers' own caches cannot run beside it, and models other than UNets cannot combine it with
    ``scope="stack"``.

    Args:
        every: every so many-th step is a full step, which runs everything, ≥ 1. Raising it saves more, and
            the picture follows the dense one less closely. 1: no step reuses anything.
        shallow_every: of a UNet, every so many-th step runs all of the finest level, 1 ≤ shallow_every ≤
            every; the others run only its last layer. Raising it saves most in narrow models and large
            pictures, where that level takes most of the time. It loses more than raising ``every``, above
            all under strong guidance.
        shallow_from: share of the steps, 0 ≤ shallow_from < 1, that run all of the finest level before any
            step skips it. Raising it gives up the saving of these steps and brings the picture closer.
        span: longest distance between two full steps, as a share of all steps, 0 < span ≤ 1; half of it for
            the finest level. It limits the loss in short generations, whose steps differ more from each
            other. Raising it saves more there, and loses more.

    Raises:
        ConfigError: a value is outside these ranges.
    """

    every: int = 1
    shallow_every: int = 1
    shallow_from: float = 0.0
    span: float = 1.0

    def __post_init__(self) -> None:
        checks = {
            "every": integer(1),
            "shallow_every": integer(1),
            "shallow_from": number("a share of the steps, from 0 to below 1", lambda value: 0 <= value < 1),
            "span": share,
        }
        check_fields(self, "reuse.", checks)
        if self.shallow_every > self.every:
            wanted = f"1 to reuse.every={self.every}, as a full step runs the finest level too"
            refuse("reuse.shallow_every", wanted, self.shallow_every)

    def intervals(self, steps: int) -> tuple[int, int]:
        """Steps from one full step to the next, and from one that runs the finest level to the next.

        Args:
            steps: of the generation.

        >>> StepReuse(every=4, shallow_every=2, span=0.25).intervals(steps=8)
        (2, 1)
        """
        span = self.span * steps
        return max(1, min(self.every, int(span))), max(1, min(self.shallow_every, int(span / 2)))
