"""Diffusion transformers of images: one or two streams of text and image, and their ControlNets."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tests.models.family import TEXT, WORDS, Family, noise, text_masks
from torch import Tensor

# Four heads of eight channels, rotary positions of three axes.
HEADS = {"attention_head_dim": 8, "num_attention_heads": 4}
FLUX = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": TEXT,
    "axes_dims_rope": (2, 2, 4),
    **HEADS,
}


def positions(rows: int, columns: int, axes: int = 3) -> Tensor:
    """Image number, row, column and zeros for each token of an image."""
    ids = torch.zeros(rows, columns, axes)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    return ids.view(-1, axes)


def _flux(name: str, **settings: Any) -> Any:
    import diffusers

    with warnings.catch_warnings():
        # Some models import a part of themselves from a deprecated place of diffusers.
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(diffusers, name)(**{**FLUX, **settings})


def _flux_inputs(batch: int, rows: int, columns: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, rows * columns, 4),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": positions(rows, columns),
        "txt_ids": torch.zeros(WORDS, 3),
        **more,
    }


def _flux_2_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    ids = {"img_ids": positions(rows, columns, 4), "txt_ids": torch.zeros(WORDS, 4)}
    return _flux_inputs(batch, rows, columns, **ids)


def _chroma_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    mask = torch.cat([text_masks(batch), torch.ones(batch, rows * columns, dtype=torch.bool)], dim=1)
    return _flux_inputs(batch, rows, columns, attention_mask=mask)


def _flux_control_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    control = noise(batch, rows * columns, 4).flip(1)
    return _flux_inputs(batch, rows, columns, pooled_projections=noise(batch, TEXT), controlnet_cond=control)


def _fibo_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return _flux_inputs(
        batch, rows, columns, text_encoder_layers=[noise(batch, WORDS, TEXT) * (i + 1) for i in range(4)]
    )


def _bria_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    mask = text_masks(batch)[:, None, None].float() - 1
    image = torch.zeros(batch, 1, 1, rows * columns)
    inputs = _fibo_inputs(batch, rows, columns)
    return {**inputs, "joint_attention_kwargs": {"attention_mask": torch.cat([1e4 * mask, image], dim=-1)}}


SD3 = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "caption_projection_dim": 32,
    "pooled_projection_dim": TEXT,
    "pos_embed_max_size": 24,
    **HEADS,
}


def _sd3_control(**settings: Any) -> Any:
    from diffusers import SD3ControlNetModel

    return SD3ControlNetModel(**{**SD3, "joint_attention_dim": TEXT, **settings})


def _sd3_control_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    latents = noise(batch, 4, 2 * rows, 2 * columns)
    return {
        "hidden_states": latents,
        "controlnet_cond": latents.flip(2),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "pooled_projections": noise(batch, TEXT),
        "timestep": torch.full((batch,), 500.0),
    }


def _sd35_control_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    inputs = _sd3_control_inputs(batch, rows, columns)
    del inputs["encoder_hidden_states"]
    return {**inputs, "hidden_states": noise(batch, rows * columns, 32)}


def _auraflow() -> Any:
    from diffusers import AuraFlowTransformer2DModel

    return AuraFlowTransformer2DModel(
        sample_size=16,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        joint_attention_dim=TEXT,
        caption_projection_dim=32,
        pos_embed_max_size=400,
        **HEADS,
    )


def _latent_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "timestep": torch.full((batch,), 0.5),
    }


QWEN = {"in_channels": 4, "num_layers": 2, "joint_attention_dim": TEXT, "axes_dims_rope": (2, 2, 4), **HEADS}


def _qwen() -> Any:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(out_channels=4, **QWEN)


def _qwen_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, rows * columns, 4),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "encoder_hidden_states_mask": text_masks(batch),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, rows, columns)]] * batch,
    }


def _qwen_control() -> Any:
    from diffusers import QwenImageControlNetModel

    return QwenImageControlNetModel(out_channels=4, extra_condition_channels=2, **QWEN)


def _qwen_control_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        **_qwen_inputs(batch, rows, columns),
        "img_shapes": [(1, rows, columns)] * batch,  # its pipelines leave out the inner list
        "controlnet_cond": noise(batch, rows * columns, 6),
        "return_dict": True,
    }


def _lumina2() -> Any:
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 32, 32),
        cap_feat_dim=TEXT,
    )


def _lumina2_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {**_latent_inputs(batch, rows, columns), "encoder_attention_mask": text_masks(batch)}


def _z_image() -> Any:
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=TEXT,
        axes_dims=[4, 2, 2],
        axes_lens=[128, 32, 32],
    )


def _z_image_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "x": list(noise(batch, 4, 1, 2 * rows, 2 * columns)),
        "t": torch.full((batch,), 0.5),
        # Padded to multiples of 32: of different length.
        "cap_feats": [words[: WORDS + 30 * i] for i, words in enumerate(noise(batch, WORDS + 60, TEXT))],
    }


COGVIEW = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_dim": TEXT,
    "time_embed_dim": 16,
    "condition_dim": 4,
    "pos_embed_max_size": 16,
    "sample_size": 16,
    **HEADS,
}


def _cogview3plus() -> Any:
    from diffusers import CogView3PlusTransformer2DModel

    return CogView3PlusTransformer2DModel(**COGVIEW)


def _cogview4() -> Any:
    from diffusers import CogView4Transformer2DModel

    return CogView4Transformer2DModel(rope_axes_dim=(16, 16), **COGVIEW)


def _cogview_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    sizes = {name: torch.full((batch, 2), 64.0) for name in ("original_size", "target_size", "crop_coords")}
    return {**_latent_inputs(batch, rows, columns), **sizes}


def _cogview4_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    # More words than tokens: its MLP runs on the text too, which must not be taken for the image.
    return {
        **_cogview_inputs(batch, rows, columns),
        "encoder_hidden_states": noise(batch, 100, TEXT),
        "attention_mask": text_masks(batch, 100),
    }


def _hunyuan_image() -> Any:
    from diffusers import HunyuanImageTransformer2DModel

    return HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=(2, 2),
        text_embed_dim=TEXT,
        text_embed_2_dim=12,
        rope_axes_dim=(4, 4),
        **HEADS,
    )


def _hunyuan_image_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        **_latent_inputs(batch, rows, columns),
        "encoder_attention_mask": text_masks(batch),
        "encoder_hidden_states_2": noise(batch, WORDS, 12),
        "encoder_attention_mask_2": text_masks(batch + 1)[1:],
    }


def _prx() -> Any:
    from diffusers import PRXTransformer2DModel

    return PRXTransformer2DModel(
        in_channels=4, context_in_dim=TEXT, hidden_size=32, num_heads=4, depth=2, axes_dim=[4, 4]
    )


def _prx_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {**_latent_inputs(batch, rows, columns), "attention_mask": text_masks(batch)}


# Sequences that hold reference images after the image that is made. A grid of one column has no cell to
# merge, so the references of such an image have one column too.


def _with_references(
    inputs: dict[str, Any], sizes: list[tuple[int, int]], numbers: list[int]
) -> dict[str, Any]:
    """Inputs of a model with img_ids, with reference images of these sizes after its image."""
    made, batch = inputs["img_ids"], len(inputs["hidden_states"])
    made[:, 0] = numbers[0]
    ids = [made]
    for number, (rows, columns) in zip(numbers[1:], sizes, strict=True):
        ids.append(positions(rows, columns, made.shape[1]) + made[0])
        ids[-1][:, 0] = number
    tokens = sum(map(len, ids))
    return {**inputs, "img_ids": torch.cat(ids), "hidden_states": noise(batch, tokens, 4)}


def _kontext_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    inputs = _flux_inputs(batch, rows, columns, pooled_projections=noise(batch, TEXT))
    return _with_references(inputs, [(2 * rows, columns)], [0, 1])


def _flux_2_references_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    inputs = _flux_2_inputs(batch, rows, columns)
    return _with_references(inputs, [(rows, columns), (rows + 3, columns)], [0, 10, 20])


def _longcat_edit_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    inputs = _flux_inputs(batch, rows, columns)
    inputs["img_ids"][:, 1:] += 512  # after the positions of the text
    return _with_references(inputs, [(rows, columns)], [1, 2])


def _fibo_edit_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    inputs = _with_references(_fibo_inputs(batch, rows, columns), [(rows + 2, columns)], [0, 1])
    image = torch.zeros(batch, 1, 1, inputs["hidden_states"].shape[1])
    mask = text_masks(batch)[:, None, None].float() - 1
    return {**inputs, "joint_attention_kwargs": {"attention_mask": torch.cat([1e4 * mask, image], dim=-1)}}


def _qwen_edit(**settings: Any) -> Any:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(out_channels=4, **QWEN, **settings)


def _qwen_edit_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    shapes = [(1, rows, columns), (1, rows + 1, columns), (1, 2 * rows, columns)]
    tokens = sum(h * w for _, h, w in shapes)
    return {
        **_qwen_inputs(batch, rows, columns),
        "hidden_states": noise(batch, tokens, 4),
        "img_shapes": [shapes] * batch,
    }


def _qwen_layered_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    shapes = [*[(1, rows, columns)] * 3, (1, rows + 1, columns)]
    tokens = sum(h * w for _, h, w in shapes)
    return {
        **_qwen_inputs(batch, rows, columns),
        "hidden_states": noise(batch, tokens, 4),
        "img_shapes": [shapes] * batch,
        "additional_t_cond": torch.zeros(batch, dtype=torch.int64),
    }


JOY = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "text_dim": TEXT,
    "num_layers": 3,
    "rope_dim_list": [2, 2, 4],
}


def _joy(**settings: Any) -> Any:
    from diffusers import JoyImageEditTransformer3DModel

    return JoyImageEditTransformer3DModel(**JOY, **settings)


def _joy_inputs(batch: int, rows: int, columns: int, pictures: int = 3) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, pictures, 4, 1, 2 * rows, 2 * columns),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
    }


def _joy_plus() -> Any:
    from diffusers import JoyImageEditPlusTransformer3DModel

    return JoyImageEditPlusTransformer3DModel(**JOY)


def _joy_plus_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    shapes = [(1, rows, columns), (1, rows + 1, columns), (1, 2 * rows, columns)]
    patches = sum(h * w for _, h, w in shapes)
    return {
        "hidden_states": noise(batch, patches + 5, 4, 1, 2, 2),  # padded, as in a batch with a longer sample
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "encoder_hidden_states_mask": text_masks(batch),
        "shape_list": [shapes] * batch,
    }


ROTARY: dict[str, Any] = {"attention": ("attn",)}

FAMILIES: dict[str, Family] = {
    "FluxControlNetModel": Family(
        lambda: _flux("FluxControlNetModel", pooled_projection_dim=TEXT), _flux_control_inputs, **ROTARY
    ),
    "Flux2Transformer2DModel": Family(
        lambda: _flux("Flux2Transformer2DModel", axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False),
        _flux_2_inputs,
        **ROTARY,
    ),
    "ChromaTransformer2DModel": Family(
        lambda: _flux(
            "ChromaTransformer2DModel",
            approximator_num_channels=16,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        _chroma_inputs,
        **ROTARY,
    ),
    "BriaTransformer2DModel": Family(lambda: _flux("BriaTransformer2DModel"), _flux_inputs, **ROTARY),
    "BriaFiboTransformer2DModel": Family(
        lambda: _flux("BriaFiboTransformer2DModel", text_encoder_dim=TEXT), _bria_inputs, **ROTARY
    ),
    "LongCatImageTransformer2DModel": Family(
        lambda: _flux("LongCatImageTransformer2DModel", pooled_projection_dim=TEXT), _flux_inputs, **ROTARY
    ),
    "OvisImageTransformer2DModel": Family(
        lambda: _flux("OvisImageTransformer2DModel", out_channels=4), _flux_inputs, **ROTARY
    ),
    "SD3ControlNetModel": Family(_sd3_control, _sd3_control_inputs, attention=("attn",)),
    "SD3ControlNetModel of SD 3.5": Family(
        lambda: _sd3_control(joint_attention_dim=None, use_pos_embed=False),
        _sd35_control_inputs,
        attention=("attn",),
    ),
    "AuraFlowTransformer2DModel": Family(_auraflow, _latent_inputs, attention=("attn",)),
    "QwenImageTransformer2DModel": Family(_qwen, _qwen_inputs, **ROTARY),
    "QwenImageControlNetModel": Family(_qwen_control, _qwen_control_inputs, **ROTARY),
    "Lumina2Transformer2DModel": Family(_lumina2, _lumina2_inputs, attention=("attn",)),
    "ZImageTransformer2DModel": Family(_z_image, _z_image_inputs, attention=("attention",)),
    "CogView3PlusTransformer2DModel": Family(_cogview3plus, _cogview_inputs),
    "CogView4Transformer2DModel": Family(_cogview4, _cogview4_inputs),
    "PRXTransformer2DModel": Family(_prx, _prx_inputs, attention=("attention",)),
    "FluxTransformer2DModel, Kontext": Family(
        lambda: _flux("FluxTransformer2DModel", pooled_projection_dim=TEXT), _kontext_inputs, **ROTARY
    ),
    "Flux2Transformer2DModel, two references": Family(
        lambda: _flux("Flux2Transformer2DModel", axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False),
        _flux_2_references_inputs,
        **ROTARY,
    ),
    "LongCatImageTransformer2DModel, Edit": Family(
        lambda: _flux("LongCatImageTransformer2DModel", pooled_projection_dim=TEXT),
        _longcat_edit_inputs,
        **ROTARY,
    ),
    "BriaFiboTransformer2DModel, Edit": Family(
        lambda: _flux("BriaFiboTransformer2DModel", text_encoder_dim=TEXT), _fibo_edit_inputs, **ROTARY
    ),
    "QwenImageTransformer2DModel, Edit": Family(
        lambda: _qwen_edit(zero_cond_t=True), _qwen_edit_inputs, **ROTARY
    ),
    "QwenImageTransformer2DModel, Layered": Family(
        lambda: _qwen_edit(use_layer3d_rope=True, use_additional_t_cond=True),
        _qwen_layered_inputs,
        frames=3,
        **ROTARY,
    ),
    "JoyImageEditTransformer3DModel": Family(_joy, _joy_inputs, **ROTARY),
    "JoyImageEditTransformer3DModel, multimodal positions": Family(
        lambda: _joy(rope_type="mrope"), _joy_inputs, **ROTARY
    ),
    "JoyImageEditPlusTransformer3DModel": Family(_joy_plus, _joy_plus_inputs, attention=("attn",)),
    "HunyuanImageTransformer2DModel": Family(_hunyuan_image, _hunyuan_image_inputs, **ROTARY),
}
