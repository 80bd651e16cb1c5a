"""Other people's code that looks into a model: attention processors, forward hooks and replaced methods.

A controller may count the calls of a layer, and a store may keep what a layer computes for each token. The
default method leaves what they look at alone: it runs in every step, on all tokens. Other settings are used
with a warning, and are refused where a pipeline of diffusers would fail.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from tokenmerge.config import StepReuse, ToMeConfig
from tokenmerge.config.origin import is_default
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Grids, modules_in
from tokenmerge.runtime.blocks.forward import takes_part
from tokenmerge.runtime.memory.state import (
    STATE,
    BlockState,
    LayerState,
    LeftAlone,
    ModelState,
    SpanState,
    StageState,
)
from tokenmerge.runtime.patching.call_checks import merges_tokens, phases_at
from tokenmerge.runtime.patching.other_patches import refuse_other_patches

# Processors and hooks of these packages compute a result, and keep nothing of what they see …
PACKAGES = ("accelerate", "diffusers", "peft", "tokenmerge", "torch")
# … except for these processors of diffusers' pipelines, each with the attention that its pipeline reads.
_STORES = {
    "AttendExciteAttnProcessor": ("attn2",),
    "CrossAttnStoreProcessor": ("attn1", "attn2"),
    "LEDITSCrossAttnProcessor": ("attn2",),
    "Pix2PixZeroAttnProcessor": ("attn2",),
}


def watchers_in(root: nn.Module) -> dict[str, Any]:
    """Return the class or function that looks at a module, by the path of the module in its model."""
    found = {}
    for module in modules_in(root)[1:]:
        code = _watcher_of(module)
        if code is not None:
            found[module] = code
    watchers: dict[str, Any] = {}
    if not found:
        return watchers
    for path, module in root.named_modules():
        code = found.get(module)
        if code is not None:
            stored = _STORES.get(code.__qualname__)  # stores are in all attention, and read in some
            if stored is None or path.rpartition(".")[2] in stored:
                watchers[path] = code
    return watchers


def _watcher_of(module: nn.Module) -> Any:
    """Return the class or function that looks at a module, or None if there is none."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for hook in hooks.values():
            if getattr(hook, "__self__", None) is not module and not _only_computes(hook):
                return function_of(hook)
    # ``getattr`` takes ten times as long where there is none.
    processor = module.__dict__.get("processor", module._modules.get("processor"))
    if processor is not None and is_watching(processor):
        return function_of(processor)
    if processor is not None or STATE in module.__dict__:  # attention, or something that merges
        for method in ("forward", "_forward"):
            replaced = module.__dict__.get(method)
            if replaced is not None and not (_only_computes(replaced) or _is_own(module, method, replaced)):
                return function_of(replaced)
    return None


def is_watching(processor: Any) -> bool:
    """Return whether an attention processor may keep something of what it sees."""
    return not _only_computes(processor) or function_of(processor).__qualname__ in _STORES


def look(
    state: ModelState, root: nn.Module, pipe: Any, config: ToMeConfig, grids: Grids | None = None
) -> LeftAlone:
    """Find the code that looks at what a model would merge or skip in a generation, and say so once.

    ``pipe`` runs, or was patched. ``grids`` are the finest token grids of the next call, if they are known.
    """
    refuse_other_patches(root)
    found = watchers_in(root)
    if not found:
        return LeftAlone(config)
    merged = set(merged_parts(state, config, grids))
    skipped = dict(_skipped_parts(state, config))
    seen = {path: code for path, code in found.items() if meets(path, {*merged, *skipped})}
    if not seen:
        return LeftAlone(config)
    more = f" and {len(found) - 1} other modules" if len(found) > 1 else ""
    names = dict.fromkeys(code.__qualname__ for code in found.values())
    who = f"{', '.join(names)} at {next(iter(found))}{more}"
    name = type(root).__name__
    if not is_default(state.method):
        _refuse_what_a_pipeline_reads(seen, root, pipe)
        kinds = []
        if any(meets(path, merged) for path in seen):
            kinds.append("token")
        if any(meets(path, skipped) for path in seen):
            kinds.append(f"step ({config.reuse.given})")
        state.warn_once(
            f"{name}: {who} may not see every {' and every '.join(kinds)}; the default method leaves alone "
            "what such code looks at: apply_token_merging(pipe, speedup=2.0)"
        )
        return LeftAlone(config)
    dense = {path for path in merged if meets(path, found)}
    left = merged - dense
    dense |= {block.path for block in state.blocks if not meets(block.path, left)}
    note = f"what {who} looks at runs in every step, on all tokens"
    config = _without_skips(config, skipped, found)
    if merged and not left:
        config = dataclasses.replace(config, ratio=0.0, reference_ratio=None)
    saves = "less" if left or config.reuse.on else "no"
    state.warn_once(f"{name}: {note}, so {saves} time is saved; a ToMeConfig would merge there too")
    return LeftAlone(config, frozenset(dense), note)


def _refuse_what_a_pipeline_reads(seen: Mapping[str, Any], root: nn.Module, pipe: Any) -> None:
    """Refuse settings that leave out what a pipeline of diffusers reads from its own processors."""
    # A pipeline and its processors are in one file; others only have them left over from it.
    files = {cls.__module__ for cls in type(pipe).__mro__}
    for path, code in seen.items():
        if code.__qualname__ in _STORES and code.__module__ in files:
            raise UnsupportedModelError(
                f"{type(root).__name__}: in every step, {type(pipe).__name__} reads what {code.__qualname__} "
                f"keeps of each token of {path}, and these settings merge or skip there; take the default "
                "method, which leaves it alone: apply_token_merging(pipe, speedup=2.0)"
            )


def merged_parts(state: ModelState, config: ToMeConfig, grids: Grids | None = None) -> Iterator[str]:
    """Yield the paths of the blocks that merge as a whole, and of the layers that merge in others."""
    for part in state.parts:
        if isinstance(part, StageState | SpanState):
            continue
        for level, phase in phases_at(config, (part.block if isinstance(part, LayerState) else part).level):
            if isinstance(part, LayerState):
                merges = phase.scope != "block" and takes_part(part.layer, phase)
            else:
                merges = phase.scope == "block" and part.block_layout is not None
            if merges and phase.merges and (grids is None or merges_tokens([(level, phase)], *grids)):
                yield part.path


def _skipped_parts(state: ModelState, config: ToMeConfig) -> Iterator[tuple[str, bool]]:
    """Yield the path of each part that some step skips, and whether it is at the finest level of a UNet."""
    for part in state.parts if config.reuse.on else ():
        if isinstance(part, BlockState) and part.caches_residuals:
            yield part.path, False
        elif isinstance(part, StageState) and (config.reuse.skips_finest or not part.is_finest):
            yield part.path, part.is_finest
        elif isinstance(part, SpanState):
            yield part.path, False


def _without_skips(config: ToMeConfig, skipped: dict[str, bool], found: Collection[str]) -> ToMeConfig:
    """Return the settings, with the parts in every step that somebody looks at."""
    at_finest = {finest for path, finest in skipped.items() if meets(path, found)}
    if False in at_finest:
        return dataclasses.replace(config, reuse=StepReuse())
    if not at_finest:
        return config
    reuse = dataclasses.replace(config.reuse, shallow_every=1, full_steps=(), shallow_steps=())
    return dataclasses.replace(config, reuse=reuse)


def meets(path: str, others: Collection[str]) -> bool:
    """Return whether a module is one of some others, or contains one, or is in one.

    >>> [meets(path, ["blocks.1"]) for path in ("blocks.1.attn", "blocks.1", "blocks", "blocks.10")]
    [True, True, True, False]
    """
    # An empty path is that of the model itself.
    prefix = f"{path}." if path else ""
    return any(f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(prefix) for other in others)


def _only_computes(code: Any) -> bool:
    """Return whether a hook, a processor or a method is of a package whose code keeps nothing."""
    return function_of(code).__module__.partition(".")[0] in PACKAGES


def _is_own(module: nn.Module, method: str, function: Any) -> bool:
    """Return whether a method on a module is that of its class, as removed hooks leave it there."""
    plain = getattr(function, "__func__", None)
    return plain is not None and any(vars(cls).get(method) is plain for cls in type(module).__mro__)


def function_of(code: Any) -> Any:
    """Return the function of a partial one, or the class of an object that is called; others as they are."""
    while isinstance(code, functools.partial):
        code = code.func
    return code if hasattr(code, "__qualname__") else type(code)
