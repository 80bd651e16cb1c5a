"""The text of the node: what merges, what that saves, and what steps skip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenmerge.config import MergeSettings
from tokenmerge.integrations.comfyui.models import Block, weights_of
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.models.work import Amount
from tokenmerge.ops.partition import num_tokens
from tokenmerge.planners.sequences import num_removed
from tokenmerge.plans.generation import Runs, plan_generation

_STEPS = 20  # of the example in the text
_WHERE = {"layers": "attention", "keys": "keys and values of attention", "block": "whole blocks"}


def describe(settings: Settings, latent: Sequence[int]) -> str:
    """Return what merges, for latents of shape ``[b, c, (f,) h, w]``, at the step that merges most."""
    target = settings.target
    frames, rows, columns = target.grid(latent)
    settings = settings.for_sampling((frames, rows, columns), _STEPS, None)
    config, default = settings.config, settings.default
    asked = f"planner {config.planner}, ratio {config.ratio:g}"
    if default is not None:
        asked = f"{default.name}, in an example of {_STEPS} steps"
    size = f"latents {latent[-2]} × {latent[-1]}"
    lines, dense, merged = [f"{target.name}, {size}: {_WHERE[config.scope]} merge, {asked}"], 0.0, 0.0
    unless = f", unless regrouped by {settings.regroup}" if settings.regroup else ""
    for level in target.levels:
        blocks = [block for block in target.blocks if block.level == level]
        grid = (frames, -(-rows // level), -(-columns // level))
        own = max((phase.at_level(level) for phase in config.phases()), key=lambda own: own.ratio)
        n, r = num_tokens(grid), num_removed(grid, own) if level <= settings.deepest_level else 0
        where = f"level {level}: " if target.is_unet else ""
        where += f"{len(blocks)} block{'s' * (len(blocks) > 1)}"
        if r == 0:
            lines.append(f"{where} dense, {n} tokens")
            continue
        lines.append(f"{where} merged, {n} → {n - r} tokens{unless}")
        own_dense, own_merged = _operations(blocks, own, n, n - r)
        dense, merged = dense + own_dense, merged + own_merged
    if dense:
        lines.append(
            f"Merged parts take {1 - merged / dense:.0%} fewer operations on the picture's tokens in a step "
            "that merges, without counting the matching. The rest of the model is unchanged."
        )
    elif not config.reuse.on:
        lines.append("Nothing merges at this size; take a larger picture or a higher ratio.")
    if dense and settings.regroup:
        lines.append(settings.regrouped)
    if dense and config.correction.every:
        lines.append(
            f"Of the steps that run everything, one in {config.correction.every} merges nothing and corrects "
            "the others."
        )
    lines += _step_reuse(settings)
    if (settings.start, settings.end) != (0, 1):
        lines.append(f"All this holds from {settings.start:.0%} to {settings.end:.0%} of the sampling.")
    return "\n".join([*lines, *settings.notes])


def _step_reuse(settings: Settings) -> list[str]:
    """Return what steps skip, as sentences."""
    config, target = settings.config, settings.target
    if not config.reuse.on:
        return ["All steps run the whole model."] if settings.alone else []
    ran = Counter(step.runs for step in plan_generation(config, _STEPS))
    what = "the deep stages" if target.is_unet else "the blocks"
    lines = [f"Of {_STEPS} steps, {ran[Runs.EVERYTHING]} run the whole model, and the others skip {what}."]
    if target.is_unet and ran[Runs.LEAST]:
        lines.append(f"{ran[Runs.LEAST]} of them skip the finest level too.")
    return lines


def _operations(blocks: Sequence[Block], settings: MergeSettings, n: int, m: int) -> tuple[float, float]:
    """Multiply-accumulates of the merged parts of blocks, on the tokens of one image, dense and merged."""
    layers, keys = settings.scope == "layers", settings.scope == "keys"
    # With scope "keys", queries and the output have all tokens: half of the weights, all rows of pairs.
    rows, dense, merged = n if keys else m, 0.0, 0.0
    for block in blocks:
        own = Amount() if layers and not settings.merge_attn else block.amount
        if layers and settings.merge_crossattn and (cross := block.module.attn2) is not None:
            own += Amount(per_token=weights_of(cross.to_q) + weights_of(cross.to_out))
        dense += own.at(n)
        merged += own.per_token * (rows + m) / 2 + own.per_pair * rows * m
    return dense, merged
