"""Models whose blocks no family describes: which of their modules step reuse skips, and in which calls.

No token merges in them, for the reasons in ``unsupported``. Step reuse needs neither a token grid nor the
layout of a call. Where a list of blocks is known, all of its blocks are skipped together, and what they add
is extrapolated. Where none is known, the whole model is skipped, and its output is extrapolated. A call that
fills a cache of keys and values for later calls always runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, Host, is_called
from tokenmerge.models.call import parameters
from tokenmerge.models.unsupported import REASONS

UNKNOWN = "its blocks have not been described yet"
# Names of lists that hold the blocks of a model that nobody has looked at.
_LISTS = ("transformer_blocks", "blocks", "layers")


@dataclasses.dataclass(frozen=True)
class Skipping:
    """What step reuse skips in a model that no family describes."""

    # Paths of the lists of blocks, in the order in which they run. Something may run between two lists, but
    # what runs after the last one reads nothing but the result of its last block. If there are none, the
    # whole model is skipped.
    lists: tuple[str, ...] = ()
    sample: str = ""  # name of the argument for the sample; empty: the first one
    timestep: str = ""  # name of that for the timestep; empty: the first one that is called so
    # (arguments of a call) → whether it fills a cache for later calls, so that it has to run.
    fills_cache: Callable[[Arguments], bool] | None = None
    dense: str = ""  # why it runs dense in every step; empty: step reuse skips it

    @property
    def way(self) -> str:
        """What is skipped, as a few words for tables."""
        if self.dense:
            return "dense"
        return "list of blocks" if self.lists else "whole output"


def _mode(*reading: object) -> Callable[[Arguments], bool]:
    """Return whether a call fills the cache of keys and values that it is given, by its ``kv_cache_mode``."""
    return lambda arguments: arguments.get("kv_cache_mode") not in (None, *reading)


def _far_fills(arguments: Arguments) -> bool:
    return bool((arguments.get("kv_cache_flag") or {}).get("is_cache_step"))


def _glm_fills(arguments: Arguments) -> bool:
    caches = getattr(arguments.get("kv_caches"), "caches", ())
    return any(cache.mode == "write" for cache in caches)


_BLOCKS = Skipping(("blocks",))
_LAYERS = Skipping(("layers",))
_TRANSFORMER_BLOCKS = Skipping(("transformer_blocks",))
_BOTH = Skipping(("transformer_blocks", "single_transformer_blocks"))
_WHOLE = Skipping()

# What has been looked at, by the class of a model or pipeline. A pipeline that stands here calls a model that
# a family describes in a way that its blocks cannot follow.
SKIPPING: Mapping[str, Skipping] = {
    "AceStepTransformer1DModel": _LAYERS,
    "AnyFlowFARTransformer3DModel": dataclasses.replace(_BLOCKS, fills_cache=_far_fills),
    "AnyFlowTransformer3DModel": _BLOCKS,
    "BriaFibo2Transformer2DModel": _LAYERS,
    "Cosmos3OmniTransformer": Skipping(("layers",), sample="vision_tokens", timestep="vision_timesteps"),
    "Flux2KleinKVPipeline": Skipping(fills_cache=_mode("cached")),
    "Flux3Transformer2DModel": Skipping(
        ("txt_mode_blocks", "mode_blocks.image", "mode_blocks.image_cond", "single_transformer_blocks")
    ),
    "GlmImageTransformer2DModel": dataclasses.replace(_TRANSFORMER_BLOCKS, fills_cache=_glm_fills),
    "HeliosTransformer3DModel": _BLOCKS,
    "HunyuanVideoFramepackTransformer3DModel": _BOTH,
    "Kandinsky6SRTransformer3DModel": Skipping(("visual_transformer_blocks",)),
    "Kandinsky6Transformer3DModel": Skipping(("visual_transformer_blocks",)),
    "Kandinsky3UNet": _WHOLE,
    "LongCatAudioDiTTransformer": _BLOCKS,
    "MiniMaxH3Transformer3DModel": _TRANSFORMER_BLOCKS,
    "MiniMaxMusic3Transformer1DModel": _TRANSFORMER_BLOCKS,
    "MotifVideoTransformer3DModel": _BOTH,
    "NucleusMoEImageTransformer2DModel": _TRANSFORMER_BLOCKS,
    "OmniGenTransformer2DModel": _LAYERS,
    "PriorTransformer": _TRANSFORMER_BLOCKS,
    "RFD4ProteinaTransformer": Skipping(
        dense="its pipeline follows two schedulers, and how often a call repeats its layers changes by step"
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Skipping(
        dense="its pipeline runs three steps for each part of a video, of which none can be skipped"
    ),
    "SanaWMTransformer3DModel": _BLOCKS,
    "StableAudio3DiTModel": _TRANSFORMER_BLOCKS,
    "StableAudioDiTModel": _TRANSFORMER_BLOCKS,
    "StableCascadeUNet": _WHOLE,
    "T5FilmDecoder": Skipping(("decoders",), sample="decoder_input_tokens", timestep="decoder_noise_time"),
    "UNet1DModel": _WHOLE,
    "UNet2DModel": _WHOLE,
    "UNetFlatConditionModel": _WHOLE,
    "WanAnimate2Transformer3DModel": dataclasses.replace(_BLOCKS, fills_cache=_mode("cached")),
    "WuerstchenDiffNeXt": Skipping(timestep="r"),
    "WuerstchenPrior": Skipping(timestep="r"),
    "ZImageOmniPipeline": _WHOLE,
    "ZImageControlNetModel": _WHOLE,
}


def reason_of(thing: object) -> str:
    """Return why no token merges in a model or pipeline of this class, or an empty string."""
    return next((REASONS[name] for name in _classes(thing) if name in REASONS), "")


def skipping_of(thing: object) -> Skipping | None:
    """Return what step reuse skips in a model or pipeline, or None if nobody has looked at its class."""
    return next((SKIPPING[name] for name in _classes(thing) if name in SKIPPING), None)


def _classes(thing: object) -> list[str]:
    return [cls.__name__ for cls in type(thing).__mro__]


def is_of_diffusers(module: object) -> bool:
    """Return whether the class of a module, or a base class, is a model of diffusers."""
    return any(cls.__module__.startswith("diffusers.") for cls in type(module).__mro__)


def describe(root: Any) -> Host:
    """Describe a model of which no block is described.

    Raises:
        UnsupportedModelError: it has no argument for the timestep, which tells the step.
    """
    return _described(root, root, skipping_of(root) or Skipping(lists=_only_list(root)))


def as_whole(root: Any, caller: object) -> Host:
    """Describe a model as one part, which a pipeline or ControlNet calls in a way that no block can follow.

    Raises:
        UnsupportedModelError: as for :func:`describe`.
    """
    skipping = skipping_of(caller) or Skipping()
    return _described(root, caller, dataclasses.replace(skipping, lists=(), dense=""))


def _described(root: Any, caller: object, skipping: Skipping) -> Host:
    names = tuple(parameters(type(root).forward))
    timestep = skipping.timestep or next((name for name in names if _tells_step(name)), "")
    if not timestep:
        raise UnsupportedModelError(
            _nothing(caller, "its call has no argument for the timestep, which tells the step")
        )
    return Host(
        root=root,
        blocks=(),
        sample=skipping.sample or names[0],
        timestep=timestep,
        grids=_no_grids,
        example=_no_example,
        sample_size=None,
        controlnet=is_called(root, "ControlNet"),
        described=False,
        fills_cache=skipping.fills_cache,
        span=tuple(_blocks_in(root, skipping.lists)) or ("",),
        unmerged=f"{type(caller).__name__}: {reason_of(caller) or UNKNOWN}",
    )


def refusal(host: Host) -> str:
    """Return the message of the error for settings that merge tokens in a model in which none can merge."""
    name, _, reason = host.unmerged.partition(": ")
    return (
        f"tokens cannot be merged in {name} yet: {reason}; run it without token merging, or "
        "take a model that docs/supported-models.md lists; step reuse alone speeds up its pipeline: "
        "apply_token_merging(pipe, speedup=2.0)"
    )


def why_dense(root: object) -> str:
    """Return the message of the error for a model in which no step can be skipped, or an empty string."""
    skipping = skipping_of(root)
    return _nothing(root, skipping.dense) if skipping is not None and skipping.dense else ""


def _nothing(root: object, why: str) -> str:
    return (
        f"tokens cannot be merged in {type(root).__name__} yet: {reason_of(root) or UNKNOWN}; run it without "
        "token merging, or take a model that docs/supported-models.md lists; its steps cannot be skipped "
        f"either: {why}"
    )


def skipped_parts(host: Host) -> str:
    """Say which parts of a model without described blocks are skipped together, and what is extrapolated."""
    if host.span == ("",):
        return "the whole model, whose output is extrapolated"
    count = len(host.span)
    blocks = "its block, and what it adds" if count == 1 else f"all {count} blocks, and what they add"
    return f"{blocks} is extrapolated"


def _tells_step(name: str) -> bool:
    return name == "t" or name.startswith(("time", "sigma"))


def _only_list(root: nn.Module) -> tuple[str, ...]:
    """Return the path of the list of blocks of a model that nobody has looked at, if there is one alone."""
    found = [name for name in _LISTS if isinstance(getattr(root, name, None), nn.ModuleList)]
    return tuple(found) if len(found) == 1 else ()


def _blocks_in(root: nn.Module, lists: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of the blocks in some lists, in their order."""
    for path in lists:
        blocks: Any = root
        for name in path.split("."):
            blocks = blocks._modules.get(name) if isinstance(blocks, nn.Module) else None
        for name in [] if blocks is None else blocks._modules:
            yield f"{path}.{name}"


def _no_grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    return ()


def _no_example(*size: Any, **more: Any) -> dict[str, Any]:
    raise UnsupportedModelError("the call of this model is not described, so no example of it can be made")
