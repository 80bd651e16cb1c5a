"""The text of the node: what merges, what that saves, and what steps skip."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tokenmerge.config import MergeSettings
from tokenmerge.integrations.comfyui.models import Block
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.ops import num_tokens
from tokenmerge.planners import num_removed

_STEPS = 20  # of the example in the text
_WHERE = {"layers": "attention", "keys": "keys and values of attention", "block": "whole blocks"}


def describe(settings: Settings, latent: Sequence[int]) -> str:
    """What merges, for latents of shape ``[b, c, (f,) h, w]``, at the step that merges most."""
    target, config = settings.target, settings.config.at_guidance(None)
    frames, rows, columns = target.grid(latent)
    side = f"{latent[-2]} × {latent[-1]}"
    lines, dense, merged = [], 0.0, 0.0
    others = " and ".join(settings.others.before_attention)
    for level in target.levels:
        blocks = [block for block in target.blocks if block.level == level]
        grid = (frames, -(-rows // level), -(-columns // level))
        own = max(config.stages(level), key=lambda settings: settings.ratio)
        n = num_tokens(grid)
        r = num_removed(grid, own) if level <= config.max_downsample and own.ratio else 0
        at = f"level {level}: " if target.is_unet else ""
        if r == 0:
            lines.append(f"{at}{_blocks(blocks)} dense, {n} tokens")
            continue
        own_dense, own_merged = _operations(blocks, own, n, n - r)
        dense, merged = dense + own_dense, merged + own_merged
        unless = f", unless regrouped by {others}" if others else ""
        lines.append(f"{at}{_blocks(blocks)} merged, {n} → {n - r} tokens{unless}")
    where = _WHERE[config.scope]
    head = f"{target.name}, latents {side}: {where} merge, ratio {config.ratio:g}, planner {config.planner}"
    if dense:
        lines.append(
            f"Merged parts take {1 - merged / dense:.0%} fewer operations on the picture's tokens in a step "
            "that merges, without counting the matching. The rest of the model is unchanged."
        )
    elif not config.reuse.on:
        lines.append("Nothing merges at this size; take a larger picture or a higher ratio.")
    if dense and others:
        lines.append(settings.others.regroup)
    if dense and config.correction.every:
        lines.append(
            f"Of the steps that run everything, one in {config.correction.every} is dense and corrects the "
            "others."
        )
    lines += _step_reuse(settings)
    if (settings.start, settings.end) != (0, 1):
        lines.append(f"All this holds from {settings.start:.0%} to {settings.end:.0%} of the sampling.")
    lines += settings.notes
    return "\n".join([head, *lines])


def _step_reuse(settings: Settings) -> list[str]:
    """What steps skip, as sentences."""
    config, target = settings.config.at_guidance(None), settings.target
    if not config.reuse.on:
        if settings.others.cache or settings.others.self_attention:
            return []  # the notes say why
        return ["All steps run the whole model; method auto skips parts of some."]
    steps = config.reuse.steps_of(_STEPS)
    what = "the deep stages" if target.is_unet else "the blocks"
    lines = [f"Of {_STEPS} steps, {len(steps.full)} run the whole model, and the others skip {what}."]
    if len(target.cuts) > 1 and len(steps.shallow) < _STEPS:
        lines.append(
            f"{_STEPS - len(steps.shallow)} of them skip the finest level too, except for its last layer."
        )
    merging = "attention merges" if target.is_unet else "blocks merge"
    for scale in settings.config.by_guidance:
        strong = settings.config.at_guidance(scale)
        steps = strong.reuse.steps_of(_STEPS)
        line = f"With cfg {scale:g} or more, {len(steps.full)} of {_STEPS} steps run the whole model"
        if len(steps.shallow) < _STEPS:
            line += f", {_STEPS - len(steps.shallow)} skip the finest level too"
        line += f", and {merging} at ratio {strong.ratio:g}"
        if strong.correction.on:
            line += f", corrected by every {strong.correction.every}th of these steps"
        lines.append(f"{line}.")
    return lines


def _blocks(blocks: Sequence[Block]) -> str:
    return f"{len(blocks)} block{'s' * (len(blocks) > 1)}"


def _operations(blocks: Sequence[Block], settings: MergeSettings, n: int, m: int) -> tuple[float, float]:
    """Multiply-accumulates of the merged parts of blocks, on the tokens of one image, dense and merged."""
    dense = merged = 0.0
    for block in blocks:
        weights, pairs = _work(block, settings)
        dense += weights * n + pairs * n * n
        # With scope "keys", queries and the output have all tokens: half of the weights, all rows of pairs.
        rows = n if settings.scope == "keys" else m
        merged += weights * (rows + m) / 2 + pairs * rows * m
    return dense, merged


def _work(block: Block, settings: MergeSettings) -> tuple[int, int]:
    """In the merged parts of a block: weights that multiply each token, and operations per pair of tokens."""
    module = block.module
    if block.layout is not None:
        return _weights(module), 2 * block.channels
    own, other = settings.scope == "keys" or settings.merge_attn, settings.scope == "layers"
    weights = _weights(module.attn1) if own else 0
    if other and settings.merge_crossattn and module.attn2 is not None:
        weights += _weights(module.attn2.to_q) + _weights(module.attn2.to_out)
    return weights, 2 * block.channels * own


# Parts of the names of weights that multiply text, or one vector for the whole picture.
_OF_OTHERS = ("txt", "context_block", "add_", "mod", "cross_attn.k", "cross_attn.v")


def _weights(module: nn.Module) -> int:
    """Number of weights of a module that multiply each token of the image."""
    return sum(
        weight.numel()
        for name, weight in module.named_parameters()
        if weight.ndim == 2 and not any(part in name for part in _OF_OTHERS)
    )
