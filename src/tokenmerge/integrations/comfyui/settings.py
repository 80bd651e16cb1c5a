"""The settings of a model from the inputs of the node, and beside other nodes on the same model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tokenmerge import presets
from tokenmerge.calibration import TimedMerging, fewest_tokens
from tokenmerge.config import StepReuse, ToMeConfig
from tokenmerge.default_method import DefaultMethod
from tokenmerge.errors import ConfigError
from tokenmerge.integrations.comfyui.models import Target
from tokenmerge.models.placement import narrowest
from tokenmerge.plans import RunFacts, Schedule
from tokenmerge.plans.choose import scopes_of
from tokenmerge.runtime.blocks.stack import merges_in_stacks

AUTO = "auto"
METHODS = (AUTO, *presets.__all__)
OF_METHOD = "as the method says"
STEPS = 20  # of a sampling that is not known yet
_REUSE_EVERY = 3  # steps, of a preset with step reuse


@dataclasses.dataclass(frozen=True)
class Asked:
    """The inputs of the node, by their names."""

    method: str = AUTO  # or the name of a preset
    ratio: float = 0.5  # of a preset, the fraction of tokens removed, 0 ≤ ratio ≤ 0.75
    start_percent: float = 0.0  # share of the sampling, by noise, before which nothing merges
    end_percent: float = 1.0  # share of the sampling after which nothing merges
    scope: str = OF_METHOD
    proportional: str = OF_METHOD
    levels: str = OF_METHOD
    seed: int = 0  # of the random draws
    step_reuse: str = OF_METHOD  # whether parts of the model are skipped on some steps
    speedup: float = 2.0  # of the default method, ≥ 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings while a model samples."""

    config: ToMeConfig  # of the default method, for a size and a number of steps
    target: Target
    start: float = 0.0  # as ``start_percent`` of Asked
    end: float = 1.0
    notes: tuple[str, ...] = ()  # how the method differs in ComfyUI, as sentences
    regroup: str = ""  # other nodes before self-attention, which may regroup its tokens, as HyperTile does
    alone: bool = True  # whether no other node skips whole steps, or may read self-attention in every step
    # The default method, which chooses the settings of each sampling, or None if ``config`` has them.
    default: DefaultMethod | None = None

    def for_sampling(
        self, grid: tuple[int, int, int], steps: int, guidance: float | None, schedule: Schedule | None = None
    ) -> Settings:
        """Return the settings of one sampling. The arguments are those of :meth:`DefaultMethod.facts_at`."""
        if self.default is None:
            return self
        facts = self.default.facts_at(grid, steps, guidance, schedule)
        return dataclasses.replace(self, config=self.default.settings(facts))

    def beside(self, options: Mapping[str, Any]) -> Settings:
        """Return the settings beside the other nodes in ComfyUI's ``transformer_options``.

        The last notes say what they change.
        """
        config = self.config
        target = self.target
        default = self.default
        notes = []
        replaced = options.get("patches_replace", {})
        cache = options.get("easycache")
        regroup = ""
        attention = ""
        if target.is_unet:  # ComfyUI calls the patches of attention in UNets only
            regroup = _nodes_of(options.get("patches", {}).get("attn1_patch", ()))
            attention = _nodes_of(replaced.get("attn1", {}).values())
        why = ""
        if cache is not None:
            why = f"{cache.name} skips whole steps; keep one of the nodes"
        elif attention:
            why = f"{attention} may read self-attention in every step"
        if config.reuse.on and why:
            config = dataclasses.replace(config, reuse=StepReuse())
            if default is not None:
                facts = dataclasses.replace(default.facts, can_skip=False)
                default = dataclasses.replace(default, facts=facts)
            notes.append(f"No part of the model is skipped, since {why}.")
        if attention:
            notes.append(f"Self-attention that {attention} replaced stays dense.")
        blocks = replaced.get("dit", {})
        later = _nodes_of(blocks[block.key] for block in target.blocks if block.key in blocks)
        if later:
            notes.append(
                f"Blocks that {later} replaced after Token Merging may not merge; place Token Merging "
                "after it."
            )
        changed = dataclasses.replace(self, config=config, default=default, regroup=regroup, alone=not why)
        return dataclasses.replace(changed, notes=(*self.notes, *notes))

    @property
    def deepest_level(self) -> int:
        """The deepest level that merges: ``max_downsample``, or the finest level with attention."""
        return max(self.config.max_downsample, self.target.levels[0])

    @property
    def regrouped(self) -> str:
        """What happens where tokens are regrouped before they could merge, as a sentence."""
        return (
            "Self-attention does not merge where its tokens are regrouped by "
            f"{self.regroup}; keep one of the nodes."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # nothing in it changes, and it holds the model


def settings_for(target: Target, asked: Asked, device: torch.device, dtype: torch.dtype) -> Settings:
    """Return the settings of a model from the inputs of the node, or refuse what ComfyUI cannot do."""
    if not 0 <= asked.start_percent < asked.end_percent <= 1:
        raise ConfigError(
            f"start_percent, end_percent: expected 0 ≤ start < end ≤ 1, got {asked.start_percent:g} and "
            f"{asked.end_percent:g}; lower start_percent, or raise end_percent"
        )
    if asked.method == AUTO:
        default = _default(target, asked, device, dtype)
        config = default.settings(default.facts)
        _applied(config, target, asked)  # for its errors; the default method needs no notes
        return Settings(config, target, asked.start_percent, asked.end_percent, default=default)
    if asked.method not in METHODS:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {asked.method!r}")
    config = _changed(getattr(presets, asked.method)(asked.ratio), target, asked)
    if asked.step_reuse == "on" and target.can_skip:
        config = dataclasses.replace(config, reuse=StepReuse(every=_REUSE_EVERY))
    config, notes = _applied(config, target, asked)
    return Settings(config, target, asked.start_percent, asked.end_percent, notes)


def _default(target: Target, asked: Asked, device: torch.device, dtype: torch.dtype) -> DefaultMethod:
    known = [block for block in target.blocks if block.channels and block.heads]
    attention = narrowest(((one.channels, one.heads), (one.key[0], one.level)) for one in known)
    facts = RunFacts(
        model="unet" if target.is_unet else "transformer",
        work=target.work,
        grid=(1, 64, 64),
        steps=STEPS,
        can_skip=target.can_skip and asked.step_reuse != "off",
        whole_blocks=not target.is_unet,
        layers=target.is_unet,
    )
    batch = 2 if target.is_unet else 1
    has_mask = True
    merging = []
    for scope in scopes_of(facts):
        merging.append(TimedMerging(device, dtype, scope, has_mask, batch, *attention))
    facts = dataclasses.replace(facts, fewest_tokens=fewest_tokens(*merging))
    return DefaultMethod(asked.speedup, facts, lambda config: _changed(config, target, asked))


def _changed(config: ToMeConfig, target: Target, asked: Asked) -> ToMeConfig:
    """Return the settings of a method with those inputs of the node that replace them."""
    changes: dict[str, Any] = {}
    if target.is_unet or not merges_in_stacks(config.merge_sharing.blocks, config.at_level(1)):
        changes["features"] = "input"  # what was added in the step before is cached for stacks alone
    if config.seed is not None:
        changes["seed"] = asked.seed
    if asked.scope != OF_METHOD:
        changes["scope"] = asked.scope
    if asked.proportional != OF_METHOD:
        changes["proportional"] = asked.proportional == "on"
    if asked.levels != OF_METHOD:
        changes["max_downsample"] = int(asked.levels)
    return dataclasses.replace(config, **changes)


def _applied(config: ToMeConfig, target: Target, asked: Asked) -> tuple[ToMeConfig, tuple[str, ...]]:
    """Return the settings as far as ComfyUI lets a node apply them, with notes about the rest."""
    notes: list[str] = []
    if target.is_unet:
        if config.scope not in ("layers", "keys"):
            raise ConfigError(
                f"scope: ComfyUI lets a node change the attention of a UNet and not its whole blocks, got "
                f"{config.scope!r}, by method {asked.method!r}; take scope 'layers', or another method"
            )
        if config.merge_mlp and config.scope == "layers":
            config = dataclasses.replace(config, merge_mlp=False)
            notes.append("MLPs stay dense: ComfyUI lets a node change only the attention of a UNet.")
        if target.levels[0] > config.max_downsample:
            notes.append(f"Level {target.levels[0]} merges, which is the finest one with attention here.")
    elif config.scope != "block":
        if asked.scope != OF_METHOD or config.scope == "keys":
            another = ", and another method" if config.scope == "keys" else ""
            raise ConfigError(
                "scope: ComfyUI lets a node replace whole blocks of this model and not the layers in them, "
                f"got {config.scope!r}, by method {asked.method!r}; take scope 'block', or leave it to the "
                f"method{another}"
            )
        config = dataclasses.replace(config, scope="block")
        notes.append(
            "Whole blocks merge: ComfyUI lets a node replace the blocks of this model, not their layers."
        )
    return config, tuple(notes)


def _nodes_of(patches: Iterable[Any]) -> str:
    """Return the names of the other nodes that made patches, which are mostly functions in their methods."""
    names = []
    for patch in patches:
        if str(getattr(patch, "__module__", "")).startswith("tokenmerge."):
            continue
        qualified = str(getattr(patch, "__qualname__", type(patch).__qualname__))
        name = qualified.partition(".")[0]
        names.append(name if name.isidentifier() else "another node")
    return " and ".join(dict.fromkeys(names))
