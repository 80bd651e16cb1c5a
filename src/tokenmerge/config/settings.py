"""The settings that hold at one level and one denoising step: what planners and patched blocks get."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenmerge.config.checks import Check, Value, as_number, integer, number, one_of, optional, switch
from tokenmerge.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of a planner that checks and other parts of the library need to know."""

    guided: bool = False  # it looks at what guidance changed, and plans as "tome" before that is known
    own_number: bool = False  # it may remove another number of tokens than it is asked to
    over_time: bool = False  # its cells may reach over several frames of a video
    soft: bool = False  # it shares each token out over several merged ones
    compares_nothing: bool = False  # it does not use the values of the tokens


# Each planner ``x`` is the function ``plan_x`` in the file ``planners/x.py``.
TRAITS: Mapping[str, Traits] = {
    "importance": Traits(guided=True),
    "sito": Traits(),
    "threshold": Traits(),
    "tiled": Traits(over_time=True),
    "toma": Traits(soft=True),
    "tome": Traits(over_time=True),
    "uniform": Traits(own_number=True, compares_nothing=True),
    "windows": Traits(own_number=True),
}
PLANNERS = tuple(TRAITS)
GUIDED_PLANNERS = tuple(name for name, traits in TRAITS.items() if traits.guided)
OWN_NUMBER = tuple(name for name, traits in TRAITS.items() if traits.own_number)
OVER_TIME = tuple(name for name, traits in TRAITS.items() if traits.over_time)
SOFT_PLANNERS = tuple(name for name, traits in TRAITS.items() if traits.soft)
COMPARES_NOTHING = tuple(name for name, traits in TRAITS.items() if traits.compares_nothing)

SCOPES = ("layers", "block", "keys")
COMBINATIONS = ("mean", "keep")
# Features from the step before are what each block added, or what all blocks of a level added together.
CACHED_FEATURES = ("residual", "model_residual")
FEATURES = ("input", *CACHED_FEATURES)

_RATIO = number("a number from 0 to 1 − 1/(sx·sy), 0.75 for 2 × 2 cells", lambda ratio: ratio >= 0)

# Checks of single fields; check_together compares fields with each other.
CHECKS: Mapping[str, Check] = {
    "ratio": _RATIO,
    "reference_ratio": optional(_RATIO),
    "min_tokens": integer(0),
    "sx": integer(1),
    "sy": integer(1),
    "st": integer(1),
    "seed": optional(integer()),
    "merge_attn": switch,
    "merge_crossattn": switch,
    "merge_mlp": switch,
    "scope": one_of(SCOPES),
    "planner": one_of(PLANNERS),
    "features": one_of(FEATURES),
    "combine": one_of(COMBINATIONS),
    "threshold": number("a number from -1 to 1", lambda threshold: -1 <= threshold <= 1),
    "proportional": switch,
}


def highest_ratio(sx: int, sy: int, st: int = 1) -> float:
    """Largest fraction of tokens that one destination per ``st`` × ``sy`` × ``sx`` cell can remove.

    >>> highest_ratio(2, 2)
    0.75
    """
    return 1 - 1 / (sx * sy * st)


def check_below_highest_ratio(ratio: Any, sx: Any, sy: Any) -> None:
    """Refuse a ratio at which only the destinations are left, as ppdiffusers does, and strides below 1.

    Other ratios that are not valid are left to :class:`tokenmerge.ToMeConfig`.
    """
    highest = highest_ratio(CHECKS["sx"]("sx", sx), CHECKS["sy"]("sy", sy))
    asked = as_number(ratio)
    if asked is not None and asked >= highest:
        raise ConfigError(
            f"ratio: expected less than 1 − 1/(sx·sy) = {highest:g} for sx={sx}, sy={sy}, got {asked:g}; "
            "take a lower ratio or larger strides"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MergeSettings(Value):
    """Which tokens merge, where, and how: everything that may differ between levels and between steps.

    Users set these fields on a :class:`tokenmerge.ToMeConfig`, which checks them, and whose method
    ``at_level`` returns the settings of one level. This class itself checks nothing.

    How many tokens merge:

    Args:
        ratio: fraction of tokens removed, 0 ≤ ratio ≤ 1 − 1/(sx·sy·st). This is the main knob. Raising it
            makes each merged layer faster and the image less like the dense one. 0 merges nothing.
        reference_ratio: the same for reference images, which editing models read in one sequence with the
            image that they make: FLUX.1 Kontext, FLUX.2, Qwen-Image-Edit, JoyImage-Edit. Raising it makes
            every layer faster and lets fewer details of the references through. None takes ``ratio``.
            With ``ratio=0`` only the references merge. References of fewer frames than ``st`` stay dense.
        min_tokens: token grids with fewer tokens than this stay dense, ≥ 0. Raising it brings the image
            closer to the dense one. On small grids merging saves little, so a moderate value costs no time.

    Which tokens merge:

    Args:
        sx: width in tokens of a cell with one destination, ≥ 1.
        sy: height in tokens of such a cell, ≥ 1. Raising ``sx`` or ``sy`` leaves fewer destinations. Matching
            gets faster and higher ratios become possible, but tokens merge over longer distances and with
            less similar ones, so the image gets less like the dense one.
        st: length of a cell in frames of the token grid, ≥ 1. At 1 each frame merges on its own. Raising
            it leaves fewer destinations and lets tokens merge over time: still parts merge best, and moving
            parts blur. Only ``"tiled"`` and ``"tome"`` take more than 1. Planning time of ``"tome"`` then
            grows with the square of the number of frames, that of ``"tiled"`` with it. Images need 1.
        seed: the destination of each cell is drawn at random in each step. The draw depends on this integer,
            the timestep and the cell. No seed is faster or better than another. If each sample of a batch
            has its own timestep, the highest one counts for all. With None, nothing is drawn, which costs the
            same time, and a regular pattern becomes visible at high ratios.
        planner: how merging tokens are chosen; docs/methods/planners.md compares the planners.

            - ``"tome"``: each source merges into the most similar destination of the whole image (arXiv
              2303.17604). Planning time grows with the square of the number of tokens.
            - ``"tiled"``: the same within tiles of about 32 × 32 cells, or 4 × 16 × 16 over time: as close,
              and much faster on large grids.
            - ``"uniform"``: each cell merges into its destination and nothing is compared. It removes
              1 − 1/(sx·sy) of the tokens at any ratio above 0, and loses detail finer than a cell.
            - ``"windows"``: whole cells merge, the most uniform first (arXiv 2505.11707): fast, coarse at
              high ratios.
            - ``"sito"``: the most typical token of each cell is its destination (SiTo, AAAI 2025): twice the
              comparisons of ``"tome"``, and not closer.
            - ``"threshold"``: as ``"tome"``, but less similar tokens are dropped instead of averaged (arXiv
              2501.00946).
            - ``"importance"``: destinations are drawn where guidance changes the image most (arXiv
              2411.16720).
            - ``"toma"``: each token is shared out over several destinations of its cell (arXiv 2509.10918).
              It needs large cells and takes long to plan, so keep plans for several steps
              (``merge_sharing.every``).
        features: what the planner compares; docs/methods/features.md says which is closest on which model.

            - ``"input"``: the tokens that the block is called with. It costs nothing.
            - ``"residual"``: what the block added to each token at the step before (after arXiv 2605.22011).
              It costs the memory of one residual for each block that plans, which the report counts.
            - ``"model_residual"``: what all blocks of the level together added at the step before, one
              residual for all. Use it in transformers, with ``merge_sharing.blocks``, so that they have
              one plan too.
              Do not use it in UNets: their images get farther from the dense ones.

            Residuals belong to a generation. The first step, the first step after a change of shape, and
            calls with gradients compare the input instead.
        threshold: for ``planner="threshold"``: the cosine similarity, −1 ≤ threshold ≤ 1, from which a token
            is averaged with its destination. Raising it drops more tokens instead; the speed stays the same.

    How tokens combine:

    Args:
        combine: ``"mean"`` averages the tokens of a group. ``"keep"`` keeps the destination and drops the
            others: slightly faster and slightly worse.
        proportional: let a merged token count in self- or joint attention as often as the number of tokens it
            stands for (arXiv 2210.09461, equation 1). The image gets several dB closer for a little time.
            A kernel that takes a mask gets one. Others get longer heads, or are called twice if they cannot
            take these: docs/methods.md. A model that computes attention by matrix products is refused.

    Where tokens merge:

    Args:
        scope: ``"layers"`` merges before and unmerges after each layer that the next three fields name.
            ``"block"`` merges once around a whole transformer block and adds the block's change to each
            token: the largest saving, and a large loss. ``"keys"`` merges only the keys and values of
            self-attention: the smallest saving and loss. Only ``"layers"`` looks at the next three fields.
        merge_attn: merge around self-attention, or the joint attention of image and text: a large saving for
            a small loss.
        merge_crossattn: merge the queries of cross-attention: a small saving, a small loss.
        merge_mlp: merge around the feed-forward layer: a large saving, and by far the largest loss.
    """

    ratio: float = 0.5
    reference_ratio: float | None = None
    min_tokens: int = 0
    sx: int = 2
    sy: int = 2
    st: int = 1
    seed: int | None = 0
    merge_attn: bool = True
    merge_crossattn: bool = False
    merge_mlp: bool = False
    scope: str = "layers"
    planner: str = "tome"
    features: str = "input"
    combine: str = "mean"
    threshold: float = 0.9
    proportional: bool = False

    def removed_of(self, tokens: int) -> int:
        """Return how many of so many tokens the ratio removes: ratio · n, rounded down.

        >>> MergeSettings(ratio=0.3).removed_of(64)
        19
        """
        return int(tokens * self.ratio)

    @property
    def merges(self) -> bool:
        """Whether any image of a sequence may merge."""
        return self.ratio > 0 or bool(self.reference_ratio)

    @property
    def merged_layers(self) -> tuple[str, ...]:
        """Sub-layers of a transformer block that merge, in the order in which the block runs them.

        ``"attn1"`` is self-attention or joint attention, ``"attn2"`` cross-attention, ``"ff"`` the MLP,
        whatever the model calls them.
        """
        wanted = {"attn1": self.merge_attn, "attn2": self.merge_crossattn, "ff": self.merge_mlp}
        return tuple(filter(wanted.get, wanted))


def check_together(settings: MergeSettings) -> None:
    """Check what must fit together in settings of one level and step, whose fields are valid one by one."""
    if settings.features != "input" and settings.planner in COMPARES_NOTHING:
        raise ConfigError(
            f"features: planner={settings.planner!r} compares no tokens, got "
            f"features={settings.features!r}; take another planner, or features='input'"
        )
    if settings.st > 1 and settings.planner not in OVER_TIME:
        others = " or ".join(f"planner={name!r}" for name in OVER_TIME)
        raise ConfigError(
            f"planner: {settings.planner!r} stays within a frame, and st={settings.st} reaches over "
            f"time; take {others}, or st=1"
        )
    highest = highest_ratio(settings.sx, settings.sy, settings.st)
    for name, ratio in (("ratio", settings.ratio), ("reference_ratio", settings.reference_ratio)):
        if ratio is not None and ratio > highest:
            over_time = f", st={settings.st}" if settings.st > 1 else ""
            raise ConfigError(
                f"{name}: expected 0 ≤ {name} ≤ 1 − 1/(sx·sy{over_time and '·st'}) = {highest:g} for "
                f"sx={settings.sx}, sy={settings.sy}{over_time}, got {ratio:g}; take a lower {name}, or a "
                f"ToMeConfig with a larger sx or sy"
            )
    if settings.scope == "layers" and not settings.merged_layers:
        raise ConfigError(
            "merge_attn, merge_crossattn, merge_mlp: all are False, so nothing would merge; set one"
        )
