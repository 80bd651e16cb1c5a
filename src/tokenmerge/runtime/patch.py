"""Checking, patching and restoring whole models.

The blocks and layers that merge get another class, and so do the parts of a UNet that are skipped on some
steps; :mod:`tokenmerge.runtime.swap` does that. The models around them keep their classes, which pipelines
compare, and get hooks that read the denoising step and the token grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.models.base import Block, Host
from tokenmerge.models.layout import Grid
from tokenmerge.runtime.caches import Plans, Stack
from tokenmerge.runtime.forward import block_call, layer_call, stage_call
from tokenmerge.runtime.hooks import check_grid, note_call, note_end, note_grid, note_result
from tokenmerge.runtime.host_method import parameters
from tokenmerge.runtime.select import blocks_to_merge, layers_to_merge, skipped_parts, why_nothing_merges
from tokenmerge.runtime.state import STATE, BlockState, LayerState, Run, StageState
from tokenmerge.runtime.swap import add_hook, check_swappable, swap, undo

__all__ = ["check_host", "hosts_that_merge", "new_run", "patch_host", "restore", "run_of"]


def hosts_that_merge(
    hosts: Sequence[Host], config: ToMeConfig, size: tuple[int, int] | None
) -> tuple[list[Host], list[NothingToMergeError]]:
    """Check all models of a pipeline before any is changed.

    Args:
        hosts: the models.
        config: what to merge and how much.
        size: height and width of the sample; None: what each model was made for.

    Returns:
        The hosts that merge, and why others, ControlNets beside a denoiser that merges, stay dense.

    Raises:
        NothingToMergeError: the denoiser, or a ControlNet without a denoiser, would merge nothing.
        UnsupportedModelError: a block cannot be patched.
    """
    merging, left_dense = [], []
    for host in hosts:
        beside = not host.controlnet and any(other.controlnet for other in hosts)
        if config.merges_stacks and host.between and beside:
            raise UnsupportedModelError(
                f"scope='stack' leaves tokens merged from block to block of {type(host.root).__name__}, and "
                "the ControlNet adds to them there; take scope='block', with share_plan=True for one plan"
            )
        try:
            check_host(host, config, size or host.sample_size)
            merging.append(host)
        except NothingToMergeError as error:
            if not host.controlnet:
                raise
            left_dense.append(error)
    if not merging:
        raise left_dense[0]
    return merging, left_dense


def check_host(host: Host, config: ToMeConfig, size: tuple[int, int] | None) -> None:
    """Find out, before anything is changed, whether the host would merge.

    Args:
        host: the model.
        config: what to merge and how much.
        size: height and width of the sample, if known.

    Raises:
        NothingToMergeError: it has no block that would merge.
        UnsupportedModelError: a block cannot be patched.
    """
    blocks = blocks_to_merge(host, config)
    if not blocks:
        raise NothingToMergeError(why_nothing_merges(host, config))
    if config.reuse_every > 1 and not (host.can_pause or host.controlnet):
        raise UnsupportedModelError(
            f"reuse_every={config.reuse_every}: no part of {type(host.root).__name__} can be left out of a "
            "step; take reuse_every=1"
        )
    if config.reuse_every > 1 and config.merges_stacks and not (host.below or host.controlnet):
        raise UnsupportedModelError(
            f"reuse_every={config.reuse_every}: in a stack no block alone has all tokens, and of "
            f"{type(host.root).__name__} nothing but blocks can be left out of a step; take scope='block' "
            "or reuse_every=1"
        )
    if size is not None:
        rows, columns = (-(-side // host.patch) for side in size)
        check_grid(new_run(host, config), (host.frames, rows, columns))
    for block in blocks:
        check_swappable(block.module, block.path, block.method)
        for layer in layers_to_merge(block, config):
            module = getattr(block.module, layer.name)
            check_swappable(module, f"{block.path}.{layer.name}", "forward")
    for path, _, _ in skipped_parts(host, config):
        check_swappable(host.root.get_submodule(path), path, "forward")


def new_run(host: Host, config: ToMeConfig) -> Run:
    """What the blocks of a host will share."""
    levels = sorted({block.level for block in blocks_to_merge(host, config)})
    names = parameters(type(host.root).forward)
    return Run(
        config, host.sample, host.timestep, names, host.grid, tuple(levels), host.latents, host.between
    )


def patch_host(host: Host, run: Run) -> None:
    """Patch a host that :func:`check_host` accepts and that is not patched."""
    grids: dict[nn.Module, Grid] = {}
    shared: dict[tuple[int, bool, str], Plans] = {}
    run.blocks.clear()
    run.layers.clear()
    run.below.clear()
    run.finest.clear()
    for block in blocks_to_merge(host, run.config):
        grid = run.grid if block.grid is None else grids.setdefault(block.grid, Grid())
        layer_states = layers_to_merge(block, run.config)
        state = BlockState(run, block.level, grid, block.path, block.layout, block.batched, block.wide)
        if run.config.share_plan:
            # On a UNet's way up tokens are alike in other ways than on its way down.
            way = block.path.partition(".")[0]
            state.plans = shared.setdefault((block.level, block.batched, way), state.plans)
        run.blocks.append(state)
        swap(block.module, block.method, block_call, state)
        for layer in layer_states:
            layer_state = LayerState(state, layer.kind, layer.layout, layer.own_keys, layer.keys)
            run.layers.append(layer_state)
            swap(getattr(block.module, layer.name), "forward", layer_call, layer_state)
    _join_stacks(run, {block.path: block for block in host.blocks})
    for module, grid in grids.items():
        add_hook(module, note_grid, grid)
    for path, finest, is_last in skipped_parts(host, run.config):
        module = host.root.get_submodule(path)
        stage_state = StageState(run, finest, is_last, grids.get(module))
        (run.finest if finest else run.below).append(stage_state)
        swap(module, "forward", stage_call, stage_state)
    add_hook(host.root, note_call, run)
    if run.config.follows_steps:
        host.root.register_forward_hook(note_end)
    if run.config.asks_guidance:
        host.root.register_forward_hook(note_result)


def _join_stacks(run: Run, blocks: Mapping[str, Block]) -> None:
    """Tell blocks which stack they are in; of a model on several devices each has stacks of its own."""

    def where(state: BlockState) -> tuple[str | None, Any]:
        block = blocks[state.path]
        weight = next(block.module.parameters(), None)
        return block.stack if block.wide else None, None if weight is None else weight.device

    for (name, _), joined in itertools.groupby(run.blocks, where):
        if name is not None:
            states, stack = list(joined), Stack()
            for state in states:
                state.stack = stack
            states[0].is_first = states[-1].is_last = True


def run_of(root: nn.Module) -> Run | None:
    """What the blocks of a patched model share; None for a model that is not patched."""
    return root.__dict__.get(STATE)


def restore(root: nn.Module) -> None:
    """Give every module of a model back what it had; a model that is not patched stays as it is."""
    for module in root.modules():
        if STATE in module.__dict__:
            if isinstance(state := module.__dict__[STATE], Run):  # whoever holds the handle holds it
                state.same.forget()
                state.forget()
            undo(module)
