"""The node "Token Merging", as ComfyUI describes nodes."""

from __future__ import annotations

from typing import Any

from tokenmerge.integrations.comfyui.models import find_target
from tokenmerge.integrations.comfyui.patch import patched
from tokenmerge.integrations.comfyui.report import describe
from tokenmerge.integrations.comfyui.settings import (
    LEVELS,
    METHODS,
    OF_METHOD,
    SCOPES,
    SWITCH,
    Asked,
    beside,
    settings_for,
)


def _choice(values: tuple[str, ...], tooltip: str) -> tuple[list[str], dict[str, Any]]:
    return list(values), {"default": values[0], "tooltip": tooltip, "advanced": values[0] == OF_METHOD}


def _number(
    default: float, tooltip: str, allowed: tuple[float, float, float] = (0.0, 1.0, 0.01)
) -> tuple[str, dict[str, Any]]:
    lowest, highest, step = allowed
    return "FLOAT", {"default": default, "min": lowest, "max": highest, "step": step, "tooltip": tooltip}


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
        seed = {"default": 0, "min": 0, "max": 2**31 - 1, "advanced": True, "control_after_generate": False}
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model. It is not changed; a clone merges tokens."}),
                "method": _choice(
                    METHODS,
                    "auto merges where that saves time, and skips parts of the model on some steps, to "
                    "reach the wanted speed-up. The others are published methods, and take the ratio.",
                ),
                "ratio": _number(
                    0.5,
                    "Share of the tokens that the other methods remove. Raising it is faster, and the "
                    "picture less close to the dense one.",
                    (0.0, 0.75, 0.01),
                ),
                "start_percent": _number(
                    0.0, "Nothing merges and nothing is skipped before this share of the sampling."
                ),
                "end_percent": _number(
                    1.0,
                    "Nothing merges and nothing is skipped after this share. Lowering it keeps fine detail.",
                ),
            },
            "optional": {
                "latent": ("LATENT", {"tooltip": "Only its size is read, for the text output."}),
                "scope": _choice(
                    SCOPES, "Where tokens merge: UNets take layers or keys, transformers block."
                ),
                "proportional": _choice(
                    SWITCH, "Weigh a merged token in attention by the number of tokens it stands for."
                ),
                "levels": _choice(LEVELS, "Deepest level of a UNet that merges; 1 is the latent's size."),
                "seed": (
                    "INT",
                    {**seed, "tooltip": "Seed for drawing the destinations, which other tokens merge into."},
                ),
                "step_reuse": _choice(
                    SWITCH,
                    "Whether parts of the model are skipped on some steps. Only auto skips some by itself.",
                ),
                # It comes last, since saved workflows have the values in this order.
                "speedup": _number(
                    2.0,
                    "Wanted speed-up of method auto, by counted operations of the sampling. Raising it makes "
                    "the picture less like the dense one.",
                    (1.0, 10.0, 0.1),
                ),
            },
        }

    def merge(
        self,
        model: Any,
        method: str,
        ratio: float,
        start_percent: float,
        end_percent: float,
        latent: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[Any, str]:
        """Return a clone of the model that merges tokens, and what it merges; ``more``: as in ``Asked``."""
        asked = Asked(method, ratio, start_percent, end_percent, **more)
        settings = settings_for(find_target(model), asked, model.load_device, model.model_dtype())
        shape = _usual_size(model) if latent is None else tuple(latent["samples"].shape)
        clone = patched(model, settings)
        return clone, describe(beside(settings, clone.model_options["transformer_options"]), shape)


def _usual_size(model: Any) -> tuple[int, ...]:
    """Shape of the latents of a picture of 1024 × 1024, or of 512 × 512 for the first UNets."""
    form = model.model.latent_format
    side = 1024 if getattr(model.model, "adm_channels", 0) or form.latent_channels > 4 else 512
    side //= getattr(form, "spacial_downscale_ratio", 8)
    return 1, form.latent_channels, *[1] * (form.latent_dimensions - 2), side, side


NODE_CLASS_MAPPINGS = {"TokenMerging": TokenMerging}
NODE_DISPLAY_NAME_MAPPINGS = {"TokenMerging": "Token Merging"}
