"""The settings of a model from the inputs of the node."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tokenmerge import presets
from tokenmerge.auto import with_skipped_blocks, with_skipped_stages
from tokenmerge.config import Correction, ToMeConfig
from tokenmerge.errors import ConfigError, NothingToMergeError
from tokenmerge.integrations.comfyui.models import Target
from tokenmerge.integrations.comfyui.others import Others
from tokenmerge.planners.calibration import fewest_tokens

METHODS = ("auto", *presets.__all__)
OF_METHOD = "as the method says"
SCOPES = (OF_METHOD, "layers", "keys", "block")
SWITCH = (OF_METHOD, "on", "off")
LEVELS = (OF_METHOD, "1", "2", "4", "8")


@dataclasses.dataclass(frozen=True)
class Asked:
    """The inputs of the node.

    Attributes:
        method: ``"auto"`` or the name of a preset.
        ratio: fraction of tokens removed, 0 ≤ ratio ≤ 0.75.
        start: share of the sampling, by noise, before which nothing merges.
        end: share of the sampling after which nothing merges.
        scope, proportional, levels: settings that replace those of the method.
        seed: seed of the random draws.
        step_reuse: whether method ``"auto"`` skips parts of the model on some steps.
    """

    method: str = "auto"
    ratio: float = 0.5
    start: float = 0.0
    end: float = 1.0
    scope: str = OF_METHOD
    proportional: str = OF_METHOD
    levels: str = OF_METHOD
    seed: int = 0
    step_reuse: str = OF_METHOD


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings while a model samples.

    Attributes:
        config: which tokens merge, where and how.
        target: the model.
        start: share of the sampling, by noise, before which nothing merges.
        end: share of the sampling after which nothing merges.
        notes: how the method differs in ComfyUI, as sentences.
        others: what other nodes do to the model.
    """

    config: ToMeConfig
    target: Target
    start: float = 0.0
    end: float = 1.0
    notes: tuple[str, ...] = ()
    others: Others = dataclasses.field(default_factory=Others)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # nothing in it changes, and it holds the model


def settings_for(target: Target, asked: Asked, device: torch.device, dtype: torch.dtype) -> Settings:
    """The settings of a model from the inputs of the node.

    Raises:
        ConfigError: a value is out of range, or ComfyUI has no way to do this with the model.
        NothingToMergeError: the model has no attention at the levels that merge.
    """
    if not 0 <= asked.start < asked.end <= 1:
        raise ConfigError(
            f"start_percent, end_percent: expected 0 ≤ start < end ≤ 1, got {asked.start:g} and "
            f"{asked.end:g}; lower start_percent, or raise end_percent"
        )
    if asked.method == "auto":
        config = _auto(target, asked.ratio, device, dtype)
        if asked.ratio and asked.step_reuse != "off":
            config = _with_step_reuse(config, target)
    elif asked.method in METHODS:
        config = getattr(presets, asked.method)(asked.ratio)
    else:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {asked.method!r}")
    changes: dict[str, Any] = {"seed": asked.seed}
    if asked.scope != OF_METHOD:
        changes["scope"] = asked.scope
    if asked.proportional != OF_METHOD:
        changes["proportional"] = asked.proportional == "on"
    if asked.levels != OF_METHOD:
        changes["max_downsample"] = int(asked.levels)
    config = dataclasses.replace(config, **changes)
    if asked.method != "auto" and asked.step_reuse == "on":
        config = dataclasses.replace(config, reuse=_with_step_reuse(config, target).reuse)
    notes: list[str] = []
    if target.is_unet:
        config = _for_unet(config, target, asked, notes)
    else:
        config = _for_transformer(config, asked, notes)
    return Settings(config, target, asked.start, asked.end, tuple(notes))


def _auto(target: Target, ratio: float, device: torch.device, dtype: torch.dtype) -> ToMeConfig:
    """The settings of :func:`tokenmerge.auto.choose` without step reuse, as far as a node can apply them."""
    checked = ToMeConfig(ratio=ratio, max_downsample=min(8, target.levels[-1]))
    if ratio == 0:
        return checked
    widths = min(((b.channels, b.heads) for b in target.blocks if b.channels and b.heads), default=())
    return dataclasses.replace(
        checked,
        min_tokens=fewest_tokens(device, dtype, *widths),
        scope="layers" if target.is_unet else "block",
        planner="tiled",
        proportional=True,
        correction=Correction(every=2),
    )


def _with_step_reuse(config: ToMeConfig, target: Target) -> ToMeConfig:
    """The settings of :func:`tokenmerge.auto.choose` with step reuse, if a part can be skipped."""
    if not target.is_unet:
        return with_skipped_blocks(config, whole=True)
    return with_skipped_stages(config, target.work) if target.work and target.cuts else config


def _for_unet(config: ToMeConfig, target: Target, asked: Asked, notes: list[str]) -> ToMeConfig:
    if config.scope not in ("layers", "keys"):
        raise ConfigError(
            f"scope: ComfyUI lets a node change the attention of a UNet and not its whole blocks, got "
            f"{config.scope!r}, by method {asked.method!r}; take scope 'layers', or another method"
        )
    if config.merge_mlp and config.scope == "layers":
        config = dataclasses.replace(config, merge_mlp=False)
        notes.append("MLPs stay dense: ComfyUI lets a node change only the attention of a UNet.")
    finest = target.levels[0]
    if finest > config.max_downsample and asked.levels == OF_METHOD:
        config = dataclasses.replace(config, max_downsample=finest)
        notes.append(f"This UNet has no attention above level {finest}, so level {finest} merges.")
    if finest > config.max_downsample:
        raise NothingToMergeError(
            f"nothing to merge: levels is {asked.levels}, and the attention of {target.name} is at the "
            f"levels {', '.join(map(str, target.levels))}; set levels to {finest} or more"
        )
    return config


def _for_transformer(config: ToMeConfig, asked: Asked, notes: list[str]) -> ToMeConfig:
    if config.scope == "block":
        return config
    if asked.scope != OF_METHOD or config.scope == "keys":
        raise ConfigError(
            "scope: ComfyUI lets a node replace whole blocks of this model and not the layers in them, got "
            f"{config.scope!r}, by method {asked.method!r}; take scope 'block', or leave it to the method"
            + (", and another method" if config.scope == "keys" else "")
        )
    notes.append(
        "Whole blocks merge: ComfyUI lets a node replace the blocks of this model, not their layers."
    )
    return dataclasses.replace(config, scope="block")
