"""The node "Token Merging", as ComfyUI describes nodes: its inputs, and the text that says what merges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenmerge.config import MergeSettings
from tokenmerge.integrations.comfyui.models import MergingBlock, find_target, weights_of
from tokenmerge.integrations.comfyui.patch import patched
from tokenmerge.integrations.comfyui.settings import METHODS, OF_METHOD, STEPS, Asked, Settings, settings_for
from tokenmerge.models.work import Amount
from tokenmerge.ops.partition import num_tokens
from tokenmerge.planners.sequences import num_removed
from tokenmerge.plans.generation import StepKind, plan_generation

_STEP = 0.01  # of the fields for numbers
_MOST_RATIO = 0.75  # with a destination for every 2 × 2 tokens
_MOST_SPEEDUP = 10.0
_SPEEDUP_STEP = 0.1
_WHERE = {"layers": "attention", "keys": "keys and values of attention", "block": "whole blocks"}


def _number(default: float, tooltip: str, **limits: float) -> tuple[str, dict[str, Any]]:
    about = {"default": default, "min": 0.0, "max": 1.0, "step": _STEP, "tooltip": tooltip}
    return "FLOAT", {**about, **limits}


def _choice(tooltip: str, *values: str) -> tuple[list[str], dict[str, Any]]:
    return [OF_METHOD, *values], {"default": OF_METHOD, "tooltip": tooltip, "advanced": True}


class TokenMerging:
    """Merges tokens of a diffusion model and skips parts of it on some steps, on a clone of it."""

    CATEGORY = "model_patches/tokenmerge"
    DESCRIPTION = (
        "Merges redundant tokens before attention (UNets) or before whole blocks (FLUX, SD3, Wan, "
        "Qwen-Image, HunyuanVideo), and restores them after it. Method auto also skips parts of the model on "
        "some steps, and extrapolates their outputs from earlier steps."
    )
    FUNCTION = "merge"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "what_merges")
    OUTPUT_TOOLTIPS = (
        "A clone of the model that merges tokens.",
        "What merges and what it saves, at the size of the latent. Show it with a Preview Any node.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs, in ComfyUI's form."""
        method = (
            "auto merges where that saves time, and skips parts of the model on some steps, to reach the "
            "wanted speed-up. The others are published methods, and take the ratio."
        )
        seed = {"default": 0, "min": 0, "max": 2**31 - 1, "advanced": True, "control_after_generate": False}
        required = {
            "model": ("MODEL", {"tooltip": "The model. It is not changed; a clone merges tokens."}),
            "method": ([*METHODS], {"default": METHODS[0], "tooltip": method, "advanced": False}),
            "ratio": _number(
                0.5,
                "Share of the tokens that the other methods remove. Raising it is faster, and the "
                "image less close to the dense one.",
                max=_MOST_RATIO,
            ),
            "start_percent": _number(
                0.0, "Nothing merges and nothing is skipped before this share of the sampling."
            ),
            "end_percent": _number(
                1.0, "Nothing merges and nothing is skipped after this share. Lowering it keeps fine detail."
            ),
        }
        optional = {
            "latent": ("LATENT", {"tooltip": "Only its size is read, for the text output."}),
            "scope": _choice(
                "Where tokens merge: UNets take layers or keys, transformers block.",
                "layers",
                "keys",
                "block",
            ),
            "proportional": _choice(
                "Weigh a merged token in attention by the number of tokens it stands for.", "on", "off"
            ),
            "levels": _choice(
                "Deepest level of a UNet that merges; 1 is the latent's size.", "1", "2", "4", "8"
            ),
            "seed": (
                "INT",
                {**seed, "tooltip": "Seed for drawing the destinations, which other tokens merge into."},
            ),
            "step_reuse": _choice(
                "Whether parts of the model are skipped on some steps. Only auto skips some by itself.",
                "on",
                "off",
            ),
            # It comes last, since saved workflows have the values in this order.
            "speedup": _number(
                2.0,
                "Wanted speed-up of the default method (auto), by operations of the sampling. Raising it "
                "makes the image less like the dense one.",
                **{"min": 1.0, "max": _MOST_SPEEDUP, "step": _SPEEDUP_STEP},
            ),
        }
        return {"required": required, "optional": optional}

    def merge(self, model: Any, latent: dict[str, Any] | None = None, **inputs: Any) -> tuple[Any, str]:
        """Return a clone of the model that merges tokens, and what it merges."""
        settings = settings_for(find_target(model), Asked(**inputs), model.load_device, model.model_dtype())
        shape = _usual_size(model) if latent is None else tuple(latent["samples"].shape)
        clone = patched(model, settings)
        return clone, describe(settings.beside(clone.model_options["transformer_options"]), shape)


def _usual_size(model: Any) -> tuple[int, ...]:
    """Return the shape of the latents of an image of 1024 × 1024, or of 512 × 512 for the first UNets."""
    form = model.model.latent_format
    side = 1024 if getattr(model.model, "adm_channels", 0) or form.latent_channels > 4 else 512
    side //= getattr(form, "spacial_downscale_ratio", 8)
    frames = (1,) * (form.latent_dimensions - 2)
    return 1, form.latent_channels, *frames, side, side


def describe(settings: Settings, latent: Sequence[int]) -> str:
    """Return what merges, for latents of shape ``[b, c, (f,) h, w]``, at the step that merges most."""
    target = settings.target
    frames, rows, columns = target.grid(latent)
    settings = settings.for_sampling((frames, rows, columns), STEPS, None)
    config = settings.config
    default = settings.default
    asked = f"planner {config.planner}, ratio {config.ratio:g}"
    if default is not None:
        asked = f"the default method, {default.name}, in an example of {STEPS} steps"
    size = f"latents {latent[-2]} × {latent[-1]}"
    lines = [f"{target.name}, {size}: {_WHERE[config.scope]} merge, {asked}"]
    dense = 0.0
    merged = 0.0
    unless = f", unless regrouped by {settings.regroup}" if settings.regroup else ""
    for level in target.levels:
        blocks = [block for block in target.blocks if block.level == level]
        grid = (frames, -(-rows // level), -(-columns // level))
        phases = [phase.at_level(level) for phase in config.phases()]
        most = max(phases, key=lambda phase: phase.ratio)
        n = num_tokens(grid)
        r = num_removed(grid, most) if level <= settings.deepest_level else 0
        where = f"{len(blocks)} blocks" if len(blocks) > 1 else f"{len(blocks)} block"
        if target.is_unet:
            where = f"level {level}: {where}"
        if r == 0:
            lines.append(f"{where} dense, {n} tokens")
            continue
        lines.append(f"{where} merged, {n} → {n - r} tokens{unless}")
        own_dense, own_merged = _operations(blocks, most, n, n - r)
        dense += own_dense
        merged += own_merged
    if dense:
        lines.append(
            f"Merged parts take {1 - merged / dense:.0%} fewer operations on the image's tokens in a step "
            "that merges, without counting the matching. The rest of the model is unchanged."
        )
    elif not config.reuse.on:
        lines.append("Nothing merges at this size; take a larger image or a higher ratio.")
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
    config = settings.config
    target = settings.target
    if not config.reuse.on:
        return ["All steps are full: they run the whole model."] if settings.alone else []
    plan = plan_generation(config, STEPS)
    count = Counter(step.kind.in_model(target.is_unet) for step in plan)
    lines = [f"Of {STEPS} steps, {count[StepKind.FULL]} are full: they run the whole model."]
    if count[StepKind.SHALLOW]:
        lines.append(f"{count[StepKind.SHALLOW]} are shallow: they run the finest level of the UNet alone.")
    if count[StepKind.SKIPPED]:
        lines.append(f"{count[StepKind.SKIPPED]} are skipped: no block runs in them.")
    return lines


def _operations(
    blocks: Sequence[MergingBlock], settings: MergeSettings, n: int, m: int
) -> tuple[float, float]:
    """Count the multiply-accumulates of what merges in blocks, for one image, dense and merged."""
    layers = settings.scope == "layers"
    keys = settings.scope == "keys"
    # With scope "keys", queries and the output have all tokens: half of the weights, all rows of pairs.
    rows = n if keys else m
    dense = 0.0
    merged = 0.0
    for block in blocks:
        amount = Amount() if layers and not settings.merge_attn else block.amount
        cross = block.module.attn2 if layers and settings.merge_crossattn else None
        if cross is not None:
            amount += Amount(per_token=weights_of(cross.to_q) + weights_of(cross.to_out))
        dense += amount.at(n)
        merged += amount.per_token * (rows + m) / 2 + amount.per_pair * rows * m
    return dense, merged


NODE_CLASS_MAPPINGS = {"TokenMerging": TokenMerging}
NODE_DISPLAY_NAME_MAPPINGS = {"TokenMerging": "Token Merging"}
