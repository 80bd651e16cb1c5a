"""Checks of a call of a patched model: its arguments, its size, and what does not fit its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokenmerge.config import OWN_NUMBER, ToMeConfig
from tokenmerge.config.origin import instead, named
from tokenmerge.errors import ConfigError, NothingToMergeError, UnsupportedModelError
from tokenmerge.models.base import GridShape
from tokenmerge.models.placement import Shard, shard_of
from tokenmerge.ops.partition import num_tokens
from tokenmerge.planners.sequences import sequence_of, sequence_of_part
from tokenmerge.plans.generation import StepKind, plan_generation
from tokenmerge.runtime.blocks.proportional_attention import reach_kernels
from tokenmerge.runtime.memory.state import ModelState, Phases, warn_caller
from tokenmerge.runtime.patching.other_patches import refuse_later_patches
from tokenmerge.runtime.steps.scheduler import DenoisingStep


def phases_at(config: ToMeConfig, *levels: int) -> Phases:
    """Return what holds at some levels in each phase."""
    found = []
    for level in levels:
        found += [(level, phase.at_level(level)) for phase in config.phases()]
    return tuple(found)


def merges_tokens(phases: Phases, *grids: GridShape) -> bool:
    """Return whether a call with these finest grids of (frames, rows, columns) has tokens to merge."""
    for level, settings in phases:
        grids_of_level = [(f, -(-h // level), -(-w // level)) for f, h, w in grids]
        if sequence_of(grids_of_level, settings).removed > 0:
            return True
    return False


def check_grid(phases: Phases, *grids: GridShape, method: str = "") -> None:
    """Refuse a call with finest grids of (frames, rows, columns) that have no tokens to merge."""
    if merges_tokens(phases, *grids) or not any(settings.merges for _, settings in phases):
        return
    if torch.compiler.is_compiling():  # a graph for all sizes knows no numbers
        raise NothingToMergeError(
            "nothing to merge: the sample gives too few tokens; generate a larger image, lower "
            "min_tokens, sx and sy, or raise ratio"
        )
    level, settings = next(phase for phase in phases if phase[1].merges)
    if len(grids) == 1 and not settings.ratio:
        raise NothingToMergeError(
            f"nothing to merge: reference_ratio={settings.reference_ratio:g} merges reference images, "
            "and there is none in the sequence; raise ratio to merge the image that is being made"
        )
    frames, rows, columns = grids[0]
    sides = [-(-rows // level), -(-columns // level)]
    if frames > 1:
        sides.insert(0, frames)
    over_time = f" × st={settings.st}" if settings.st > 1 else ""
    cells = f"cells of sy={settings.sy} × sx={settings.sx}{over_time}"
    fewest = f" and min_tokens={settings.min_tokens}" if settings.min_tokens else ""
    lower = f"{'min_tokens, ' if fewest else ''}{'sx, sy and st' if over_time else 'sx and sy'}"
    given = named(method, f"ratio={settings.ratio:g} with {cells}{fewest}")
    raise NothingToMergeError(
        f"nothing to merge: the sample gives {' × '.join(map(str, sides))} tokens at level {level}, of "
        f"which {given} removes none; generate a larger image, "
        f"{'or ' if method else ''}{instead(method, f'lower {lower}, or raise ratio')}"
    )


def check_call(state: ModelState, root: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that does not fit the settings, and leave its finest token grids to the blocks."""
    thread = state.threads.value
    call = state.call
    compiling = torch.compiler.is_compiling()
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            f"{type(root).__name__}: torch.jit.trace, which torch.onnx.export(dynamo=False) and "
            "openvino.convert_model(example_input=…) call too, would draw the same tokens in every step and "
            "freeze what is cached between steps; write the model for ONNX Runtime or OpenVINO with "
            "`tokenmerge export`, take torch.export.export or torch.onnx.export(dynamo=True), or call "
            "remove_token_merging(model) first to trace the dense model"
        )
    needed = [name for name in (call.sample, call.timestep) if isinstance(name, str)]
    missing = [name for name in needed if arguments.get(name) is None]
    if missing:
        raise UnsupportedModelError(
            f"{type(root).__name__}: called without {' and '.join(missing)}; token merging reads the token "
            f"grid and the step from {' and '.join(needed)}, so pass {'both' if len(needed) > 1 else 'it'}"
        )
    if not compiling:
        reach_kernels(state)  # this model may be a copy, and kernels may have been loaded since
        refuse_later_patches(state, root)
    thread.shard = shard_of(root)
    if state.merges:
        grids = call.grids(root, arguments, state.given_grid or thread.grid)
        if compiling or grids != thread.grid.shapes:  # those of the last call have been checked
            _check_size(state, grids)
            thread.grid.shapes = grids
        if thread.shard is not None:
            _check_shard(state, root, thread.shard, grids)


def _check_size(state: ModelState, grids: Sequence[GridShape]) -> None:
    """Refuse a call with finest grids that have no tokens to merge, unless it may run dense."""
    if state.config.reuse.on:  # it saves time without merging
        return
    try:
        check_grid(state.phases, *grids, method=state.method)
    except NothingToMergeError as error:
        if not state.dense_if_too_small:
            raise
        state.warn_once(str(error) + "; until then a call with a sample of this size runs dense")


def _check_shard(state: ModelState, root: nn.Module, shard: Shard, grids: Sequence[GridShape]) -> None:
    """Refuse parts of images, one for each device, from which not equally many tokens can be removed."""
    for _, settings in state.phases:
        whole = sequence_of(grids, settings)
        every = [sequence_of_part(whole.pictures, index, shard.parts) for index in range(shard.parts)]
        shown = " + ".join(" × ".join(map(str, grid)) for grid in grids)
        where = f"{type(root).__name__}: context parallelism splits {shown} tokens into {shard.parts} parts"
        if whole.removed and not every[shard.index].removed:
            raise UnsupportedModelError(
                f"{where}, and nothing can merge in one of them: it has no whole cell of sy={settings.sy} × "
                f"sx={settings.sx}, or its images have ratio 0; take fewer devices, another size, or merge "
                "in all images"
            )
        sides = [sorted(image.grid for image in one.pictures) for one in every]
        if settings.planner in OWN_NUMBER and any(one != sides[0] for one in sides):
            raise UnsupportedModelError(
                f"{where} with different grids, and planner={settings.planner!r} would not remove "
                "equally many tokens from each; take planner='tiled', or a size whose rows divide equally"
            )


def refuse_training(config: ToMeConfig, method: str) -> None:
    """Refuse settings that cache results between steps, in a call under gradients."""
    given = config.reuse.given
    off = "reuse.every=1"
    if not config.reuse.on:
        given = f"correction.every={config.correction.every}"
        off = "correction.every=0"
    if config.reuse.on or config.correction.on:
        raise ConfigError(
            f"{named(method, given)} caches results of one step for the next and is for generation: call "
            f"the model under torch.no_grad(), or {instead(method, f'take {off}')}"
        )


def warn_where_nothing_is_saved(state: ModelState, config: ToMeConfig, step: DenoisingStep) -> None:
    """Warn about a generation that is dense: too few steps to merge or to skip, and too few tokens."""
    if state.default is not None:  # it says how much of a speed-up it can reach
        return
    steps = step.steps
    grids = state.threads.value.grid.shapes
    counted = f"{steps} step{'s' if steps > 1 else ''}"
    of_steps = [rule for rule in config.rules if rule.of_steps]
    each = (config.at_step(index, steps) for index in range(steps))
    if of_steps and not any(settings.merges or settings.reuse.on for settings in each):
        warn_caller(
            f"this generation is dense: by the rules {', '.join(map(str, of_steps))}, nothing merges in any "
            f"of {counted}; leave more steps between their start and until, or take more steps"
        )
    elif (
        config.reuse.on
        and all(one.kind is StepKind.FULL for one in plan_generation(config, steps))
        and not merges_tokens(phases_at(config, *state.settings), *grids)
    ):
        fewest = "" if state.method else f", with min_tokens={config.min_tokens},"
        lower = "" if state.method else "lower min_tokens, "
        warn_caller(
            f"this generation is dense: of {counted} {named(state.method, config.reuse.given)} leaves none "
            f"out, and on {sum(map(num_tokens, grids))} tokens{fewest} nothing merges; {lower}generate a "
            "larger image, or take more steps"
        )
