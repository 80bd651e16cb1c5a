"""HunyuanVideo 1.0 and 1.5, and HunyuanImage: joint attention with the text after the image.

Only the image has rotary positions, which the whole batch shares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmerge.models.base import KEY_MASK, POSITIONS, ROTARY, Host, Layer, Layout, is_a
from tokenmerge.models.family import FUSED_MLP, Blank, device_of_values, listed, transformer_host

# Height and width of the latents, for 720p and for 2048 × 2048 pixels. Later autoencoders compress more.
_SIZES = {
    "HunyuanVideoTransformer3DModel": (90, 160),
    "HunyuanVideo15Transformer3DModel": (45, 80),
    "HunyuanImageTransformer2DModel": (64, 64),
}
CLASSES = tuple(_SIZES)

_WORDS = 256
_ATTENTION = Layout(text="last", token_arguments=(POSITIONS, KEY_MASK))
_LAYERS = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "ff"))
# Most blocks with two streams have another name for the positions.
_POSITIONS = replace(POSITIONS, name="freqs_cis")
_BLOCK = Layout(text="last", token_arguments=(POSITIONS, _POSITIONS, KEY_MASK))
# The mask of 1.5 covers the text only.
_LAYERS_15 = (Layer("attn1", "attn", replace(ROTARY, text="last")), Layer("ff", "ff"))
_BLOCK_15 = Layout(text="last", token_arguments=(_POSITIONS,))


def describe(root: Any) -> Host:
    """Find the blocks. Version 1.5 has only blocks with two streams."""
    if is_a(root, "HunyuanVideo15Transformer3DModel"):
        blocks = listed(root, "transformer_blocks", _LAYERS_15, block_layout=_BLOCK_15)
    else:
        # Some image-to-video models count the tokens of the first frame, to modulate them apart.
        replaces = getattr(root.config, "image_condition_type", None) == "token_replace"
        whole = None if replaces else _BLOCK
        dense = {"ff": FUSED_MLP}
        blocks = (
            *listed(root, "transformer_blocks", _LAYERS, block_layout=whole),
            *listed(root, "single_transformer_blocks", _LAYERS, block_layout=whole, dense=dense),
        )
    # In most checkpoints of HunyuanImage, the sample is [b, c, h, w].
    patch = root.config.patch_size
    of_pictures = not isinstance(patch, int) and len(patch) == 2
    return transformer_host(
        root,
        blocks,
        _others,
        text=(_WORDS, root.config.text_embed_dim),
        text_mask="encoder_attention_mask",
        sample_size=next(size for name, size in _SIZES.items() if is_a(root, name)),
        latent_frames=1 if of_pictures else 33,  # 129 frames of video
    )


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    arguments: dict[str, Any] = {}
    if is_a(root, "HunyuanVideoTransformer3DModel"):
        arguments["pooled_projections"] = zeros(config.pooled_projection_dim)
    if getattr(config, "use_meanflow", False):
        arguments["timestep_r"] = zeros()
    if getattr(config, "text_embed_2_dim", None):
        arguments["encoder_hidden_states_2"] = zeros(_WORDS, config.text_embed_2_dim)
        arguments["encoder_attention_mask_2"] = zeros.full_mask(_WORDS)
    if is_a(root, "HunyuanVideo15Transformer3DModel"):
        # All zeros mean that no start image is given; the model reads the values to find out.
        image = zeros(729, config.image_embed_dim)
        arguments["image_embeds"] = image.new_zeros(image.shape, device=device_of_values(root))
    return arguments
