"""What to merge and how much: plain frozen values, readable without torch."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenmerge.config.planner_names import GUIDED_PLANNERS, PLANNERS
from tokenmerge.errors import ConfigError

__all__ = ["COMBINATIONS", "GUIDED_PLANNERS", "PLANNERS", "SCOPES", "Schedule", "ToMeConfig", "highest_ratio"]

# Numbers spaced evenly over the denoising steps, with a straight line between each two, or a function of
# the share of them that is done, from 0 at the first to 1 at the last.
Schedule = Sequence[float] | Callable[[float], float]

SCOPES = ("layers", "block", "stack", "keys")
COMBINATIONS = ("mean", "keep", "norm")

# Where functions over the steps are looked at before there are steps.
_SAMPLES = tuple(i / 100 for i in range(101))

# What may differ between levels and between steps.
_CHANGEABLE = (
    *("ratio", "min_tokens", "sx", "sy", "st", "use_rand", "merge_attn", "merge_crossattn", "merge_mlp"),
    *("scope", "planner", "threshold", "combine", "proportional"),
)

# What makes settings the same at every step and for every level.
_STEADY: Mapping[str, Any] = {
    **{"schedule": None, "until": 1.0, "plan_every": 1, "correct_every": 0},
    **{"reuse_every": 1, "reuse_finest_every": 1, "reuse_finest_from": 0.0, "reuse_span": 1.0},
    **{"levels": {}, "phases": {}},
}


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
            faster and the picture less like the dense one; 0 merges nothing.

    Knobs to tinker with:

    Args:
        max_downsample: deepest resolution level that merges: 1 is the full latent resolution, 2 half of
            it, then 4 and 8. Raising it saves a little more, because deeper levels hold fewer tokens, and
            costs quality, because each of those tokens stands for more of the picture. SDXL has no
            attention at level 1 and needs 2 or more.
        min_tokens: token grids with fewer tokens stay dense, ≥ 0. Raising it brings pictures closer to the
            dense one. It costs nothing as long as it leaves blocks alone in which merging costs about what it
            saves, and beyond that the saving of those in which merging would have paid.
        sx: width of a cell of the destination grid, in tokens, ≥ 1.
        sy: height of a cell, in tokens, ≥ 1. Raising ``sx`` or ``sy`` leaves fewer destinations: matching
            becomes faster and higher ratios possible; tokens merge over longer distances and with less
            similar ones, and the picture is less like the dense one.
        st: length of a cell in frames of a video, ≥ 1. With 1 each frame merges on its own, which is the
            fastest to plan. Raising it lets tokens merge over time too: what stands still merges best and
            moving things blur; all frames are then compared with each other, which takes time that grows
            with the square of their number. Pictures have one frame and need 1.
        use_rand: draw the destination of each cell at random, anew at each denoising step. It costs no
            time; switching it off makes a regular pattern visible at high ratios.
        seed: what those draws depend on, together with the timestep and the cell; any integer. None is faster
            or better than another. Where each sample of a batch has its own timestep, as in training, the
            highest counts for all.
        merge_attn: merge around self-attention, or the joint attention of image and text: the largest
            saving, the smallest loss.
        merge_crossattn: merge the queries of cross-attention: a small saving, a small loss.
        merge_mlp: merge around the feed-forward layer: a large saving and by far the largest loss.

    Beyond that paper:

    Args:
        scope: ``"layers"`` merges and unmerges around each of the layers above. ``"block"`` merges once
            before a transformer block and unmerges behind it, all its layers in between, adding to each
            token only the change that the block made to the merged one, so that its own detail stays: the
            largest saving, and a large loss. ``"stack"`` does so once for a run of blocks: of a UNet of
            diffusers those of each transformer, of other models those of a list but for the model's first and
            last block, which stay dense. It is ``"block"`` with one plan for the run, for a little less time;
            hooks between blocks see merged tokens, and what adds to all tokens there is an error. ``"keys"``
            merges what self-attention looks at and not the tokens that look: it saves in attention alone, and
            loses least. All but the first say by themselves which layers merge; ``merge_attn``,
            ``merge_crossattn`` and ``merge_mlp`` do not count.
        planner: ``"tome"`` compares each source with all destinations: planning time grows with the square
            of the tokens, and no published planner here is clearly closer to the dense picture. ``"local"``
            compares with the destinations of the 3 × 3 cells around it: few operations, linear in the tokens,
            as close as ``"tome"`` or, with ``proportional``, less. ``"tiled"`` compares with those of the
            32 × 32 cells or so around it: ``"tome"`` on small grids, faster on large ones, as its
            operations are linear in the tokens; only what is alike farther apart is missed.
            ``"uniform"`` compares nothing and merges each cell into its destination, 1 − 1/(sx·sy) of the
            tokens for any ratio above 0: no planning time, and detail finer than a cell is lost.
            ``"windows"`` merges whole cells, the most uniform first (arXiv 2505.11707): cheap, with the
            other cells intact, and coarse where a high ratio takes cells that are not uniform. ``"sito"``
            has the most typical token of each cell as its destination (SiTo, AAAI 2025): more than twice the
            comparisons of ``"tome"``, and not closer to the dense picture. ``"threshold"`` is ``"tome"`` with
            means of similar tokens alone (arXiv 2501.00946): as fast, and not closer where it was measured.
            ``"importance"`` has its destinations where guidance changes the picture most (arXiv 2411.16720),
            and is ``"tome"`` until a guided step was made: a little slower, for what guidance draws, and
            about as close. ``"toma"`` shares the tokens of a cell out over several destinations in it (arXiv
            2509.10918), and wants large cells: many small steps to plan, so that plans should be kept
            (``plan_every``); like tokens merge within a cell alone, and the picture is not closer for it.
        combine: ``"mean"`` of the tokens that one stands for; ``"keep"`` the destination and drop the others,
            a little faster and a little worse; ``"norm"``: the mean, as long as the longest of them (arXiv
            2312.01026), which takes another pass over the tokens and keeps the length that a mean of unlike
            tokens loses; pictures were 1.5 dB farther from the dense one where it was measured.
        threshold: for ``planner="threshold"``: cosine similarity, −1 ≤ threshold ≤ 1, from which a token may
            merge into its most similar destination. Raising it keeps unlike tokens out of the means and
            drops them, up to what ``combine="keep"`` does, a little worse than a mean of all; the speed is
            that of ``ratio`` at any threshold.
        proportional: count a merged token in self- or joint attention for as many keys as it stands for
            (arXiv 2210.09461, equation 1). It brings the picture several dB closer to the dense one, and
            takes a little of the time that merged attention saves. It is a mask in PyTorch's
            ``scaled_dot_product_attention``, which its fastest kernels on a GPU do not take; a model that
            computes attention in another way is an error.
        share_guidance: one plan for all that guidance compares, the same sample with and without the prompt,
            so that what it makes of their difference is not the difference of two plans: meant for strong
            guidance, at no cost in time; without it each plan fits its own sample better. Where a pipeline
            passes them in one batch, the plan is by their mean similarity; where it calls the model for one
            after the other, it is that of the first. Both are found by looking at the samples before each
            call; with gradients, or compiled whole, calls after each other have plans of their own.

    Settings that follow the denoising steps are for pipelines, whose scheduler says which step it is; around
    a model in a loop of one's own, ``patch.at_step(i, steps)`` does. They cannot be compiled into one graph
    with the whole model, only with its blocks. What is kept from one step for the next goes after the last
    step, or with the next generation where one is cut off. With ``reuse_every`` blocks do not run
    at every step, so that diffusers' own caches beside it are an error.

    Args:
        schedule: what ``ratio`` is multiplied by at each step: numbers spaced evenly over the steps, with a
            straight line between each two, or a function of the share of them that is done, from 0 to 1.
            ``(1.4, 0.6)`` merges more at first, when the picture forgives most: closer to the dense one than
            a constant ratio of the same mean, for a little less saving in attention; rising factors are less
            close. Raising all of them does what raising ``ratio`` does. None: always by 1.
        until: share of the steps that merge, 0 < until ≤ 1; those after it are dense. Lowering it gives back
            the saving of the late steps, and with it most of the loss.
        plan_every: a plan is used for so many steps, ≥ 1. Raising it makes planning cheaper, and plans older,
            so that the picture is a little less close.
        share_plan: blocks with one token grid use the plan of the first of them; those on a UNet's way down
            and on its way up, or a transformer's joint and its single ones, have one each. Planning becomes
            as many times cheaper, and plans a little worse, as is the picture.
        correct_every: one in so many of the steps that run everything, ≥ 2, is dense, and each layer or block
            that merges keeps what it changed; on the steps in between, each token is given back how its
            change differed from that of the tokens it merges with. 0: none is dense. Raising it gives back
            less of what merging loses, and less of the time that the dense steps take: with 3, most of the
            loss goes with a third of the saving. It takes memory for one result of each layer or block. Not
            with ``scope="keys"``, which gives each token a result of its own, nor with ``"stack"``.
        reuse_every: one in so many steps runs everything, ≥ 1. In the steps between, a UNet runs its finest
            level alone, on what came up to it before (as in DeepCache, arXiv 2312.00858); other models run
            none of the blocks that can run on merged tokens as a whole. What did not run is taken on in a
            straight line from the last two steps in which it did (arXiv 2503.06923, order 1), as far as that
            line was straight before. Raising it saves more, and the picture follows less closely. It takes
            memory for two results of each block, of a UNet for two of what comes up to its finest level.
            1: everything runs. Of models other than UNets not with ``scope="stack"``.
        reuse_finest_every: of a UNet, one in so many steps runs the finest level whole, 1 ≤
            reuse_finest_every ≤ reuse_every; the steps between run its last layer on the way up alone, as
            DeepCache does. Raising it saves most where that level costs most, in narrow models and large
            pictures, and loses more than raising ``reuse_every`` does, under strong guidance above all.
        reuse_finest_from: share of the steps, 0 ≤ reuse_finest_from < 1, in which the finest level runs whole
            before it is left out of any. Raising it gives back their saving, and brings the picture closer;
            docs/methods.md has figures.
        reuse_span: longest way from one step that runs everything to the next, as a share of the generation,
            0 < reuse_span ≤ 1, and half of that for the finest level: of few steps, which differ more from
            each other, fewer are left out. Raising it saves more in short generations, and loses more there.
        levels: settings of single levels: ``{2: {"ratio": 0.25}}``. Merging less at deep levels gives up
            little time, as they hold fewer tokens, and brings the picture closer; merging less at the finest
            gives up most.
        phases: settings from a share of the steps on: ``{0.5: {"planner": "tome"}}``. What is slower and
            closer pays best late, where the picture forgives least; what is fast, early.

    Raises:
        ConfigError: a value is outside these ranges.

    >>> ToMeConfig(ratio=0.5).merged_layers
    ('attn1',)
    """

    ratio: float = 0.5
    max_downsample: int = 1
    min_tokens: int = 0
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
    schedule: Schedule | None = None
    until: float = 1.0
    plan_every: int = 1
    share_plan: bool = False
    correct_every: int = 0
    reuse_every: int = 1
    reuse_finest_every: int = 1
    reuse_finest_from: float = 0.0
    reuse_span: float = 1.0
    levels: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)
    phases: Mapping[float, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

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
        self._check_steps()
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
        if self.scope == "layers" and not self.merged_layers:
            raise ConfigError(
                "merge_attn, merge_crossattn, merge_mlp: all are False, so nothing would merge; set one"
            )

    def _check_steps(self) -> None:
        for name, key in (("levels", "level"), ("phases", "share of the steps")):
            changes = getattr(self, name)
            if not isinstance(changes, Mapping) or not all(isinstance(c, Mapping) for c in changes.values()):
                raise ConfigError(f"{name}: expected {{{key}: {{setting: value}}}}, got {changes!r}")
        _check_int("plan_every", self.plan_every, lowest=1)
        _check_int("reuse_every", self.reuse_every, lowest=1)
        _check_int("reuse_finest_every", self.reuse_finest_every, lowest=1)
        if self.reuse_finest_every > self.reuse_every:
            raise ConfigError(
                f"reuse_finest_every: expected 1 to reuse_every={self.reuse_every}, as a step that runs "
                f"everything runs the finest level too, got {self.reuse_finest_every}"
            )
        _check_int("min_tokens", self.min_tokens, lowest=0)
        _check_int("correct_every", self.correct_every, lowest=0)
        if self.asks_guidance and not self.share_guidance:
            raise ConfigError(
                f"share_guidance: planner={self.guided_planner!r} compares what guidance compares, and with "
                "share_guidance=False nothing looks for that; leave it out, or take another planner"
            )
        if self.correct_every == 1:
            raise ConfigError(
                "correct_every: with 1 every step would be dense; take 2 or more, or 0 for none"
            )
        if self.correct_every and "keys" in self._all("scope"):
            raise ConfigError(
                "correct_every: with scope='keys' every token has a result of its own, and none loses its "
                "group's; take another scope, or leave it out"
            )
        if self.correct_every and self.merges_stacks:
            raise ConfigError(
                "correct_every: with scope='stack' no block alone has all tokens to correct; take "
                "scope='block', or leave it out"
            )
        _check_share("until", self.until)
        _check_share("reuse_span", self.reuse_span)
        if not (_is_number(self.reuse_finest_from) and 0 <= self.reuse_finest_from < 1):
            raise ConfigError(
                "reuse_finest_from: expected a share of the steps, from 0 to below 1, got "
                f"{self.reuse_finest_from!r}"
            )
        if isinstance(self.schedule, Iterable):
            object.__setattr__(self, "schedule", tuple(self.schedule))
        if self.schedule is not None:
            self._check_schedule()
        for level in self.levels:
            _check_int("levels", level, lowest=1)
        for start in self.phases:
            _check_share("phases", start)
        for name in ("levels", "phases"):
            for changes in getattr(self, name).values():
                if wrong := sorted(set(changes) - set(_CHANGEABLE)):
                    raise ConfigError(
                        f"{name}: cannot change {', '.join(wrong)}; what can be changed is "
                        f"{', '.join(_CHANGEABLE)}"
                    )
        if self.levels or self.phases or self.schedule is not None:
            for level in (0, *self.levels):
                for _ in self.stages(level):  # each checks its values
                    pass

    def _check_schedule(self) -> None:
        if callable(self.schedule):
            factors = [_factor(self.schedule, done) for done in _SAMPLES]
        else:
            factors = list(self.schedule) if isinstance(self.schedule, tuple) else []
        wrong = [factor for factor in factors if not (_is_number(factor) and factor >= 0)]
        if wrong or not factors:
            found = f"{self.schedule!r}{f' with {wrong[0]!r}' if callable(self.schedule) else ''}"
            raise ConfigError(
                "schedule: expected factors ≥ 0, such as (1.4, 0.6), or a function that gives one for each "
                f"share of the steps from 0 to 1, got {found}"
            )

    @property
    def follows_steps(self) -> bool:
        """Whether it has to be known which denoising step it is."""
        return bool(self.over_steps)

    @property
    def over_steps(self) -> tuple[str, ...]:
        """The settings that depend on the denoising step, as they were given."""
        asked = {
            "until": self.until < 1,
            "schedule": self.schedule is not None,
            "phases": self.phases,
            "plan_every": self.plan_every > 1,
            "correct_every": self.correct_every,
            "reuse_every": self.reuse_every > 1,
        }
        given = tuple(f"{name}={getattr(self, name)!r}" for name, on in asked.items() if on)
        return given if self.guided_planner is None else (*given, f"planner={self.guided_planner!r}")

    @property
    def asks_guidance(self) -> bool:
        """Whether plans depend on what guidance changed in the last step."""
        return self.guided_planner is not None

    @property
    def guided_planner(self) -> str | None:
        """The first planner, of any level and any step, that looks at what guidance changed."""
        return next((name for name in self._all("planner") if name in GUIDED_PLANNERS), None)

    @property
    def merges_stacks(self) -> bool:
        """Whether some level, at some step, leaves tokens merged between blocks."""
        return "stack" in self._all("scope")

    def _all(self, name: str) -> list[Any]:
        """What a setting is at the beginning and where it is changed, on any level and from any step on."""
        changes = (*self.levels.values(), *self.phases.values())
        return [getattr(self, name), *(change[name] for change in changes if name in change)]

    def reuse(self, steps: int) -> tuple[int, int]:
        """One in how many steps runs everything, and one in how many the finest level, in so many steps.

        >>> ToMeConfig(reuse_every=4, reuse_finest_every=2, reuse_span=0.25).reuse(steps=8)
        (2, 1)
        """
        span = self.reuse_span * steps
        everything = max(1, min(self.reuse_every, int(span)))
        return everything, max(1, min(self.reuse_finest_every, int(span / 2)))

    def phase(self, index: int, steps: int) -> int:
        """How many of ``phases`` have begun at step ``index`` of ``steps``."""
        return sum(index >= round(start * steps) for start in self.phases)

    def at(self, level: int, index: int, steps: int) -> ToMeConfig:
        """What holds for a level at step ``index`` of ``steps``: the same at every step and for every level.

        >>> config = ToMeConfig(ratio=0.5, schedule=(1.0, 0.0), levels={2: {"ratio": 0.2}})
        >>> [config.at(1, i, 3).ratio for i in range(3)], config.at(2, 0, 3).ratio
        ([0.5, 0.25, 0.0], 0.2)
        """
        changes: dict[str, Any] = {}
        for start in sorted(self.phases)[: self.phase(index, steps)]:
            changes |= self.phases[start]
        if index >= round(self.until * steps):
            factor = 0.0
        else:
            factor = _factor(self.schedule, index / max(1, steps - 1))
        return self._plain({**changes, **self.levels.get(level, {})}, factor)

    def stages(self, level: int) -> Iterator[ToMeConfig]:
        """What holds for a level from the beginning and from each phase on, where it merges most."""
        for changes in self._phases():
            yield self._plain({**changes, **self.levels.get(level, {})}, self._highest_factor)

    def most(self) -> ToMeConfig:
        """The settings of the phase that merges most, at every step; those of levels stay."""
        factor = self._highest_factor
        changes = max(self._phases(), key=lambda changes: changes.get("ratio", self.ratio))
        levels = {
            level: {**own, "ratio": own["ratio"] * factor} if "ratio" in own else own
            for level, own in self.levels.items()
        }
        return dataclasses.replace(self._plain(changes, factor), levels=levels)

    def _phases(self) -> Iterator[dict[str, Any]]:
        """What is changed at the beginning, which is nothing, and from each phase on."""
        changes: dict[str, Any] = {}
        yield {}
        for start in sorted(self.phases):
            changes = {**changes, **self.phases[start]}
            yield changes

    @property
    def _highest_factor(self) -> float:
        if callable(self.schedule):  # it may be highest anywhere
            return max(_factor(self.schedule, done) for done in _SAMPLES)
        return max(self.schedule or (1.0,))

    def _plain(self, changes: dict[str, Any], factor: float) -> ToMeConfig:
        if not (self.follows_steps or self.levels):
            return self
        ratio = changes.get("ratio", self.ratio) * factor
        return dataclasses.replace(self, **{**_STEADY, **changes, "ratio": ratio})

    @property
    def whole_blocks(self) -> bool:
        """Whether all of a block runs on merged tokens."""
        return self.scope in ("block", "stack")

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
        values = dataclasses.asdict(self)
        if callable(self.schedule):
            values["schedule"] = getattr(self.schedule, "__qualname__", repr(self.schedule))
        return values


def _factor(schedule: Schedule | None, done: float) -> float:
    """The schedule's value where a share ``done`` of the steps is done."""
    if schedule is None:
        return 1.0
    if callable(schedule):
        return float(schedule(done))
    place = done * (len(schedule) - 1)
    before = min(int(place), len(schedule) - 2) if len(schedule) > 1 else 0
    after = min(before + 1, len(schedule) - 1)
    return float(schedule[before] + (schedule[after] - schedule[before]) * (place - before))


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_share(name: str, value: Any) -> None:
    if not (_is_number(value) and 0 < value <= 1):
        raise ConfigError(f"{name}: expected a share of the steps, above 0 and up to 1, got {value!r}")


def _check_int(name: str, value: object, lowest: int | None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or (lowest is not None and value < lowest)
    ):
        wanted = "an integer" if lowest is None else f"an integer ≥ {lowest}"
        raise ConfigError(f"{name}: expected {wanted}, got {value!r}")
