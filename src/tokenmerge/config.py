"""What to merge and how much: plain frozen values, readable without torch."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from tokenmerge.errors import ConfigError

__all__ = ["COMBINATIONS", "PLANNERS", "SCOPES", "ToMeConfig", "highest_ratio"]

SCOPES = ("layers", "block", "keys")
PLANNERS = ("tome", "local", "uniform", "windows", "sito", "threshold", "importance", "toma")
COMBINATIONS = ("mean", "keep", "norm")


def highest_ratio(sx: int, sy: int, st: int = 1) -> float:
    """Largest fraction of tokens that one destination per ``st`` × ``sy`` × ``sx`` cell can remove.

    >>> highest_ratio(2, 2)
    0.75
    """
    return 1 - 1 / (sx * sy * st)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToMeConfig:
    """Token merging for Stable Diffusion (arXiv 2303.17604).

    The main knob:

    Args:
        ratio: fraction of tokens removed, 0 ≤ ratio ≤ 1 − 1/(sx·sy·st). Raising it makes each merged layer
            faster and the picture less like the dense one; 0 leaves the model exactly as it is.

    Knobs to tinker with:

    Args:
        max_downsample: deepest resolution level that merges: 1 is the full latent resolution, 2 half of
            it, then 4 and 8. Raising it saves a little more, because deeper levels hold fewer tokens, and
            costs quality, because each of those tokens stands for more of the picture. SDXL has no
            attention at level 1 and needs 2 or more.
        sx: width of a cell of the destination grid, in tokens, ≥ 1.
        sy: height of a cell, in tokens, ≥ 1. Raising ``sx`` or ``sy`` leaves fewer destinations: matching
            becomes faster and higher ratios possible, and tokens merge over longer distances.
        st: length of a cell in frames of a video, ≥ 1. With 1 each frame merges on its own, which is the
            fastest to plan. Raising it lets tokens merge over time too: what stands still merges best and
            moving things blur; all frames are then compared with each other, which takes time that grows
            with the square of their number. Pictures have one frame and need 1.
        use_rand: draw the destination of each cell at random, anew at each denoising step. It costs no
            time; switching it off makes a regular pattern visible at high ratios.
        seed: what those draws depend on, together with the timestep and the cell; any integer. Where each
            sample of a batch has its own timestep, as in training, the highest counts for all.
        merge_attn: merge around self-attention, or the joint attention of image and text: the largest
            saving, the smallest loss.
        merge_crossattn: merge the queries of cross-attention: a small saving, a small loss.
        merge_mlp: merge around the feed-forward layer: a large saving and by far the largest loss.

    Beyond that paper:

    Args:
        scope: ``"layers"`` merges and unmerges around each of the layers above. ``"block"`` merges once
            before a transformer block and unmerges behind it, all its layers in between, adding to each
            token only the change that the block made to the merged one, so that its own detail stays: the
            largest saving, and a large loss. ``"keys"`` merges what self-attention looks at and not the
            tokens that look: it saves in attention alone, and loses least. The latter two say by themselves
            which layers merge; ``merge_attn``, ``merge_crossattn`` and ``merge_mlp`` do not count.
        planner: ``"tome"`` compares each source with all destinations; ``"local"`` with those of the 3 × 3
            cells around it, faster the larger the picture, over shorter distances; ``"uniform"`` compares
            nothing and merges each cell into its destination, which removes 1 − 1/(sx·sy) for any ratio
            above 0; ``"windows"`` merges whole cells, the most uniform first (arXiv 2505.11707); ``"sito"``
            has the most typical token of each cell as its destination and takes two comparisons (SiTo, AAAI
            2025); ``"threshold"`` is ``"tome"`` with means of similar tokens alone (arXiv 2501.00946);
            ``"importance"`` has its destinations where guidance changes the picture most (arXiv 2411.16720),
            and is ``"tome"`` until a guided step was made; ``"toma"`` shares the tokens of a cell out over
            several destinations in it (arXiv 2509.10918), takes longest to plan, and wants large cells.
        combine: ``"mean"`` of the tokens that one stands for; ``"keep"`` the destination and drop the others,
            a little faster and a little worse; ``"norm"``: the mean, as long as the longest of them (arXiv
            2312.01026), which takes another pass over the tokens.
        threshold: for ``planner="threshold"``: cosine similarity, −1 ≤ threshold ≤ 1, from which a token may
            merge into its most similar destination. Raising it brings the picture closer to the dense one;
            the speed is that of ``ratio`` at any threshold.
        proportional: count a merged token in self- or joint attention for as many keys as it stands for
            (arXiv 2210.09461, equation 2). It brings the picture several dB closer to the dense one. It is a
            mask in PyTorch's ``scaled_dot_product_attention``, which its fastest kernels on a GPU do not
            take; a model that computes attention in another way is an error.
        share_guidance: one plan for the two halves of a batch under classifier-free guidance, which are the
            same sample with and without the prompt, by their mean similarity, so that what guidance makes
            of their difference is not the difference of two plans. They are found by comparing the halves,
            before each call of the model; a model that is compiled whole plans for each apart.

    Raises:
        ConfigError: a value is outside these ranges.

    >>> ToMeConfig(ratio=0.5).merged_layers
    ('attn1',)
    """

    ratio: float = 0.5
    max_downsample: int = 1
    sx: int = 2
    sy: int = 2
    st: int = 1
    use_rand: bool = True
    seed: int = 0
    merge_attn: bool = True
    merge_crossattn: bool = False
    merge_mlp: bool = False
    scope: str = "layers"
    planner: str = "tome"
    combine: str = "mean"
    threshold: float = 0.9
    proportional: bool = False
    share_guidance: bool = True

    def __post_init__(self) -> None:
        for name in ("sx", "sy", "st", "max_downsample"):
            _check_int(name, getattr(self, name), lowest=1)
        for name, choices in (("scope", SCOPES), ("planner", PLANNERS), ("combine", COMBINATIONS)):
            if getattr(self, name) not in choices:
                wanted = ", ".join(map(repr, choices))
                raise ConfigError(f"{name}: expected one of {wanted}, got {getattr(self, name)!r}")
        if self.st > 1 and self.planner != "tome":
            raise ConfigError(
                f"planner: {self.planner!r} stays within a frame, and st={self.st} reaches over time; take "
                "planner='tome', or st=1"
            )
        _check_int("seed", self.seed, lowest=None)
        highest = highest_ratio(self.sx, self.sy, self.st)
        ratio = self.ratio
        if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or math.isnan(ratio):
            raise ConfigError(f"ratio: expected a number from 0 to {highest:g}, got {ratio!r}")
        if not 0 <= ratio <= highest:
            over_time = f", st={self.st}" if self.st > 1 else ""
            raise ConfigError(
                f"ratio: expected 0 ≤ ratio ≤ 1 − 1/(sx·sy{over_time and '·st'}) = {highest:g} for "
                f"sx={self.sx}, sy={self.sy}{over_time}, got {ratio:g}; take a lower ratio or larger strides"
            )
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real) or not -1 <= threshold <= 1:
            raise ConfigError(f"threshold: expected a number from -1 to 1, got {threshold!r}")
        for field in (
            "use_rand",
            "merge_attn",
            "merge_crossattn",
            "merge_mlp",
            "proportional",
            "share_guidance",
        ):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field}: expected True or False, got {getattr(self, field)!r}")
        if not self.merged_layers:
            raise ConfigError(
                "merge_attn, merge_crossattn, merge_mlp: all are False, so nothing would merge; set one"
            )

    @property
    def merged_layers(self) -> tuple[str, ...]:
        """Sub-layers of a transformer block that merge, in the order in which the block runs them.

        ``"attn1"`` is self-attention or joint attention, ``"attn2"`` cross-attention, ``"ff"`` the MLP,
        whatever the host calls them.
        """
        wanted = {"attn1": self.merge_attn, "attn2": self.merge_crossattn, "ff": self.merge_mlp}
        return tuple(name for name, on in wanted.items() if on)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for records."""
        return dataclasses.asdict(self)


def _check_int(name: str, value: object, lowest: int | None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or (lowest is not None and value < lowest)
    ):
        wanted = "an integer" if lowest is None else f"an integer ≥ {lowest}"
        raise ConfigError(f"{name}: expected {wanted}, got {value!r}")
