"""Which parts of a model merge, and checking, patching and restoring whole models.

The blocks and layers that merge get another class, and so do the parts of a UNet that are skipped on some
steps; ``swap`` does that. The models around them keep their classes, which pipelines compare, and get hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import instead, is_default, named
from tokenmerge.errors import ModelInUseError, NothingToMergeError, UnsupportedModelError
from tokenmerge.models.base import KINDS, Block, Grid, Host, Layer, modules_in
from tokenmerge.models.placement import shard_of
from tokenmerge.models.undescribed import refusal
from tokenmerge.runtime.blocks.forward import block_call, layer_call, takes_part
from tokenmerge.runtime.blocks.proportional_attention import leave_kernels, reach_kernels
from tokenmerge.runtime.blocks.skipping import stage_call
from tokenmerge.runtime.blocks.span import span_call
from tokenmerge.runtime.memory.state import (
    STATE,
    BlockState,
    CallContext,
    LayerState,
    ModelState,
    SpanState,
    StageState,
)
from tokenmerge.runtime.memory.uses import CHANGES
from tokenmerge.runtime.patching.call_checks import check_grid, phases_at
from tokenmerge.runtime.patching.hooks import after_model, before_blocks, before_model
from tokenmerge.runtime.patching.other_caches import refuse_other_caches
from tokenmerge.runtime.patching.swap import add_hook, check_swappable, swap, undo
from tokenmerge.runtime.steps.pipeline import PerThread, Pipeline


def parts_to_merge(host: Host, config: ToMeConfig) -> list[tuple[Block, list[Layer]]]:
    """Return the blocks in which something merges, each with the layers whose calls change."""
    deepest = deepest_level(host.blocks, config)
    within = [block for block in host.blocks if block.level <= deepest]
    return [(block, layers_to_merge(block, config)) for block in within if merges(block, config)]


def deepest_level(blocks: Iterable[Block], config: ToMeConfig) -> int:
    """Return the deepest level that merges: ``max_downsample``, or the finest level that can merge."""
    finest = min((block.level for block in blocks if merges(block, config)), default=1)
    return max(config.max_downsample, finest)


def merges(block: Block, config: ToMeConfig) -> bool:
    """Return whether something of a block can merge, in some phase."""
    return any(
        block.block_layout is not None
        if phase.scope == "block"
        else any(takes_part(layer, phase) for layer in block.layers)
        for _, phase in phases_at(config, block.level)
    )


def merging_paths(host: Host, config: ToMeConfig) -> Iterator[str]:
    """Yield the paths of the blocks that merge as a whole, and of the layers that merge in others."""
    for block, layers in parts_to_merge(host, config):
        for _, phase in phases_at(config, block.level):
            if not phase.merges:
                continue
            if phase.scope == "block" and block.block_layout is not None:
                yield block.path
            elif phase.scope != "block":
                yield from (f"{block.path}.{layer.name}" for layer in layers if takes_part(layer, phase))


def layers_to_merge(block: Block, config: ToMeConfig) -> list[Layer]:
    """Return the sub-layers whose calls change, in some phase."""
    phases = phases_at(config, block.level)
    return [layer for layer in block.layers if any(takes_part(layer, phase) for _, phase in phases)]


def blocks_to_change(host: Host, config: ToMeConfig) -> list[tuple[Block, list[Layer]]]:
    """Return the blocks in which something merges, and those that are only skipped, in their order."""
    merging = {block.path: layers for block, layers in parts_to_merge(host, config)}
    levels = {block.level for block in host.blocks if block.path in merging}
    return [
        (block, merging.get(block.path, []))
        for block in host.blocks
        if block.path in merging or (block.level in levels and skips(host, block, config))
    ]


def skips(host: Host, block: Block, config: ToMeConfig) -> bool:
    """Return whether some step skips a block by itself, and not with its whole stage."""
    return config.reuse.on and not host.deep_stages and block.skippable


def skipped_parts(host: Host, config: ToMeConfig) -> Iterator[tuple[str, bool, bool]]:
    """Yield the stages that some steps skip: path, whether at the finest level, whether last there."""
    if config.reuse.on:
        yield from ((path, False, path == host.deep_stages[-1]) for path in host.deep_stages)
    if config.reuse.skips_finest:
        yield from ((path, True, path == host.shallow_stages[-1]) for path in host.shallow_stages)


def skipped_modules(host: Host, config: ToMeConfig) -> Iterator[tuple[str, bool, bool]]:
    """Yield the modules that some steps skip together: path, whether first, whether last."""
    for path in host.span if config.reuse.on else ():
        yield path, path == host.span[0] != "", path == host.span[-1]


def why_nothing_merges(host: Host, config: ToMeConfig) -> str:
    """Return the message of the error for a host in which no block would merge, with what to set instead."""
    name = type(host.root).__name__
    if not host.blocks:
        return (
            f"nothing to merge: {name} has no transformer block; token merging needs a model with attention"
        )
    if config.scope != "layers":
        what = {"block": "run on merged tokens as a whole", "keys": "be given its keys apart"}
        return (
            f"nothing to merge: no transformer block of {name} can {what[config.scope]}, as "
            f"scope={config.scope!r} needs; take scope='layers'"
        )
    wanted = " or ".join(KINDS[kind] for kind in config.merged_layers)
    reasons = []
    for block in host.blocks:
        for kind in config.merged_layers:
            reason = block.dense.get(kind)
            if reason is not None and reason not in reasons:
                reasons.append(reason)
    return (
        f"nothing to merge: no transformer block of {name} has {wanted} that can merge; set merge_attn, "
        f"merge_crossattn or merge_mlp{''.join(f' ({reason})' for reason in reasons)}"
    )


def hosts_that_merge(
    hosts: Sequence[Host],
    config: ToMeConfig,
    size: tuple[int, int, int | None] | tuple[int, int] | None,
    check_size: bool = True,
    method: str = "",
) -> tuple[list[Host], list[NothingToMergeError]]:
    """Return the models of a pipeline that merge, and why ControlNets stay dense, before any is changed.

    The size is the height and width of the sample, and perhaps the frames of its token grid; None stands
    for what each model was made for. A denoiser, or a ControlNet without one, that would merge nothing is
    refused.
    """
    merging = []
    left_dense = []
    for host in hosts:
        try:
            check_host(host, config, (size or host.sample_size) if check_size else None, method)
            merging.append(host)
        except NothingToMergeError as error:
            if not host.controlnet:
                raise
            left_dense.append(error)
    if not merging:
        raise left_dense[0]
    return merging, left_dense


def check_host(
    host: Host,
    config: ToMeConfig,
    size: tuple[int, int, int | None] | tuple[int, int] | None,
    method: str = "",
) -> None:
    """Refuse a host that would not merge, or not at this size of the sample, before anything is changed."""
    if host.unmerged:
        _check_unmerged(host, config, method)
        return
    parts = parts_to_merge(host, config)
    if not parts:
        raise NothingToMergeError(why_nothing_merges(host, config))
    refuse_other_caches(host.root, config, method, set(merging_paths(host, config)))
    shard_of(host.root)  # raises where merging does not fit how its tokens are split between devices
    if config.reuse.on and not (host.can_skip or host.controlnet):
        raise UnsupportedModelError(
            f"{named(method, config.reuse.given)}: no part of {type(host.root).__name__} can be left out of "
            f"a step; {instead(method, 'take reuse.every=1')}"
        )
    if size is not None and not config.reuse.on:
        # Settings for reference images are for calls that have some.
        grids = [host.grid_at(*size)]
        if host.takes_references:
            grids.append(host.grid_at(*size))
        check_grid(phases_at(config, *sorted({block.level for block, _ in parts})), *grids, method=method)
    for block, layers in blocks_to_change(host, config):
        check_swappable(block.module, block.path, block.method)
        for layer in layers:
            check_swappable(getattr(block.module, layer.name), f"{block.path}.{layer.name}", "forward")
    for path, _, _ in skipped_parts(host, config):
        check_swappable(host.root.get_submodule(path), path, "forward")


def _check_unmerged(host: Host, config: ToMeConfig, method: str) -> None:
    """Refuse settings that merge tokens in a host in which none can merge, or that skip nothing of it."""
    is_dense = is_default(method) and not config.merges  # with a speed-up of 1
    if config.merges or not (config.reuse.on or is_dense):
        raise UnsupportedModelError(refusal(host))
    refuse_other_caches(host.root, config, method)
    shard_of(host.root)
    for path, _, _ in skipped_modules(host, config):
        check_swappable(host.root.get_submodule(path), path or type(host.root).__name__, "forward")


def new_state(host: Host, config: ToMeConfig, pipeline: Pipeline, **facts: Any) -> ModelState:
    """Return the state of a host that :func:`check_host` accepts, with further ``facts`` of a ModelState."""
    changed = blocks_to_change(host, config)
    skipped = list(skipped_parts(host, config))
    modules = list(skipped_modules(host, config))
    blocks = [block for block, _ in changed]
    merging = [merges(block, config) for block in blocks]
    # Blocks that are only skipped have no plans, nor have layers and stages.
    plan_groups = []
    for block, plans in zip(blocks, merging, strict=True):
        own_group = block.plan_group if config.merge_sharing.blocks else block.path
        plan_groups.append(own_group if plans else None)
    others = sum(len(layers) for _, layers in changed) + len(skipped) + len(modules)
    without_plans = [None] * others
    groups = (*plan_groups, *without_plans)
    levels = [block.level if plans else None for block, plans in zip(blocks, merging, strict=True)]
    phases = phases_at(config, *sorted({block.level for block in blocks}))
    state = ModelState(config, host.call, phases, groups, pipeline, **facts)
    grids = {block.grid: PerThread(Grid) for block in blocks if block.grid is not None}
    block_states = [
        BlockState(
            state,
            block.path,
            block.level,
            None if block.grid is None else grids[block.grid],
            block.layout,
            block.block_layout,
            block.beside,
            merges=merging[place],
            caches_residuals=skips(host, block, config),
            plans_first=merging[place] and plan_groups[place] not in plan_groups[:place],
            is_first=merging[place] and block.level not in levels[:place],
            is_last=merging[place] and block.level not in levels[place + 1 :],
            is_read_between=host.controlnet or block.is_read_between,
        )
        for place, block in enumerate(blocks)
    ]
    layers = [
        (block, layer)
        for block, (_, layers_of_block) in zip(block_states, changed, strict=True)
        for layer in layers_of_block
    ]
    state.parts = (
        *block_states,
        *[LayerState(block, f"{block.path}.{layer.name}", layer) for block, layer in layers],
        *[StageState(state, *stage, grids.get(host.root.get_submodule(stage[0]))) for stage in skipped],
        *[SpanState(state, *module) for module in modules],
    )
    state.blocks = block_states
    state.denoises = not host.controlnet
    state.shares_positions = any(not layer.layout.batched for _, layer in layers)
    state.skips_blocks = any(block.caches_residuals for block in block_states)
    finest = {part.is_finest for part in state.parts if isinstance(part, StageState)}
    skips_deep = state.skips_blocks or False in finest or bool(modules)
    skippable = {"deep": skips_deep, "finest": True in finest}
    state.skippable = frozenset(name for name, is_skipped in skippable.items() if is_skipped)
    pipeline.states.append(state)
    return state


def patch_host(host: Host, state: ModelState) -> None:
    """Patch a host that is not patched with the state that was made for it."""
    blocks = {block.path: block for block in host.blocks}
    for part in state.parts:
        if isinstance(part, BlockState):
            block = blocks[part.path]
            swap(block.module, block.method, block_call, part)
            if block.grid is not None and part.grid is not block.grid.__dict__.get(STATE):
                add_hook(block.grid, before_blocks, part.grid)
        elif isinstance(part, SpanState):
            # A model keeps its own state, which has this part.
            swap(host.root.get_submodule(part.path), "forward", span_call, part if part.path else state)
        else:
            call = layer_call if isinstance(part, LayerState) else stage_call
            swap(host.root.get_submodule(part.path), "forward", call, part)
    reach_kernels(state)
    state.pipeline.note_patched()
    state.threads.value.context = CallContext(state.settings)  # this thread is not in the middle of a call
    add_hook(host.root, before_model, state)
    host.root.register_forward_hook(after_model, always_call=True)


def state_of(root: nn.Module) -> ModelState | None:
    """Return the state of a patched model; None for a model that is not patched."""
    return root.__dict__.get(STATE)


def take_over(former: Any, state: Any) -> None:
    """Let a state that takes the place of another one know what threads run of the model."""
    if former is not None:
        state.uses = former.uses


def restore(root: nn.Module) -> None:
    """Give every module of a model back what it had; a model that is not patched stays as it is."""
    for module in modules_in(root):
        if STATE in module.__dict__:
            state = module.__dict__[STATE]
            if isinstance(state, ModelState):  # a handle may still hold it
                state.forget()
                leave_kernels(state)
            undo(module)


@contextlib.contextmanager
def changing(models: Iterable[nn.Module]) -> Iterator[None]:
    """Change models within the context, while no call of them begins; refuse those that other threads run."""
    with CHANGES:
        refuse_in_use(models)
        yield


def refuse_in_use(models: Iterable[nn.Module]) -> None:
    """Refuse to change models that other threads run.

    A thread runs a patched model in a call, and in a generation between its first and its last step.
    """
    for model in models:
        if STATE in model.__dict__ and model.__dict__[STATE].uses.elsewhere():
            raise ModelInUseError(
                f"a generation with this {type(model).__name__} runs in another thread, and its settings "
                "would change under it; wait until it has ended, with a lock around applying and generating, "
                "or give each thread a copy of the model that shares its weights; a loop of your own that "
                "was broken off ends when its thread does, or begins another generation"
            )
