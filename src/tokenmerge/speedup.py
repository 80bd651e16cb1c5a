"""The ratio of the default method for a wanted speed, by counted operations."""

from __future__ import annotations

import bisect

from tokenmerge.auto import choose
from tokenmerge.config.checks import number
from tokenmerge.errors import ConfigError
from tokenmerge.report import counted_speedup
from tokenmerge.runtime.pipeline import default_steps

__all__ = ["ratio_for"]

_SPEEDUP = number("a number ≥ 1, such as 2.0", lambda value: value >= 1)
_RATIOS = tuple(i / 20 for i in range(16))  # 0 to 0.75


def ratio_for(
    pipe_or_model: object,
    speedup: float,
    height: int | None = None,
    width: int | None = None,
    steps: int | None = None,
) -> float:
    """The lowest ratio of the default method whose counted operations reach a speed-up.

    The speed-up is reached at every guidance scale, so it is higher at some.
    The measured speed-up can be lower: normalisations and other operations that are not counted take time
    too, and so do the text encoder and the decoder. ``tokenmerge tune`` measures it.

    Args:
        pipe_or_model: as for :func:`tokenmerge.apply_token_merging`.
        speedup: dense operations divided by those with merging and step reuse, ≥ 1. Raising it makes the
            picture less like the dense one.
        height: height of the latents; None: the model's default size.
        width: width of the latents, likewise.
        steps: denoising steps of a generation, ≥ 1; None: the pipeline's default.

    Returns:
        The ratio, in steps of 0.05; 0 for a speed-up of 1.

    Raises:
        ConfigError: ``speedup`` is not a number ≥ 1, or no ratio reaches it.
        UnsupportedModelError: the object neither is nor contains a supported model.
    """
    speedup = _SPEEDUP("speedup", speedup)
    steps = steps or default_steps(pipe_or_model)

    def counted(ratio: float) -> float:
        """The lowest speed-up among the guidance scales at which the settings change."""
        variants = choose(pipe_or_model, ratio).variants() if ratio else ()
        speeds = (counted_speedup(pipe_or_model, one, height, width, steps=steps) for one in variants)
        return min(speeds, default=1.0)

    found = bisect.bisect_left(_RATIOS, speedup, key=counted)
    if found == len(_RATIOS):
        raise ConfigError(
            f"speedup: expected at most {counted(_RATIOS[-1]):.2f}×, counted for this model, size and number "
            f"of steps at a ratio of {_RATIOS[-1]}, got {speedup:g}; take a lower value, a larger picture "
            "or more steps"
        )
    return _RATIOS[found]
