"""Diffusion transformers of video: three frames, so that tokens of different frames can merge too."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.dits import HEADS
from tests.models.family import TEXT, WORDS, Family, noise, text_masks

FRAMES = 3
SOUND = 5  # latent frames of sound
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def _inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, FRAMES, 2 * rows, 2 * columns),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
    }


def _vace() -> Any:
    from diffusers import WanVACETransformer3DModel

    return WanVACETransformer3DModel(vace_layers=[0, 1], vace_in_channels=6, **WAN)


def _vace_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    control = noise(batch, 6, FRAMES, 2 * rows, 2 * columns)
    return {**_inputs(batch, rows, columns), "control_hidden_states": control}


def _animate() -> Any:
    from diffusers import WanAnimateTransformer3DModel

    return WanAnimateTransformer3DModel(
        **{**WAN, "in_channels": 12},
        latent_channels=4,
        image_dim=None,
        motion_encoder_size=16,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def _animate_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        **_inputs(batch, rows, columns),
        "hidden_states": noise(batch, 12, FRAMES, 2 * rows, 2 * columns),
        "pose_hidden_states": noise(batch, 4, FRAMES - 1, 2 * rows, 2 * columns),
        "face_pixel_values": noise(batch, 3, 4 * (FRAMES - 2) + 1, 16, 16),
    }


def _skyreels(inject_sample_info: bool = True) -> Any:
    from diffusers import SkyReelsV2Transformer3DModel

    return SkyReelsV2Transformer3DModel(inject_sample_info=inject_sample_info, **WAN)


def _skyreels_causal() -> Any:
    from diffusers import SkyReelsV2Transformer3DModel

    # Two frames cannot look at the next two.
    return SkyReelsV2Transformer3DModel(num_frame_per_block=2, **WAN)


def _skyreels_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {**_inputs(batch, rows, columns), "fps": [0] * batch}


def _causal_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    sample = noise(batch, 4, 4, 2 * rows, 2 * columns)
    return {**_inputs(batch, rows, columns), "hidden_states": sample}


def _frames_with_times(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Each frame has a timestep of its own, as in diffusion forcing."""
    times = torch.tensor([100.0, 300.0, 500.0]).repeat(batch, 1)
    return {**_inputs(batch, rows, columns), "timestep": times, "enable_diffusion_forcing": True}


def _wan_22() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**WAN)


def _tokens_with_times(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """The tokens of the first frame, which is given, have another timestep."""
    times = torch.full((batch, FRAMES * rows * columns), 500.0)
    times[:, : rows * columns] = 0
    return {**_inputs(batch, rows, columns), "timestep": times}


def _chronoedit() -> Any:
    from diffusers import ChronoEditTransformer3DModel

    return ChronoEditTransformer3DModel(**WAN)


HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": TEXT,
    "rope_axes_dim": (4, 2, 2),
    **HEADS,
}


def _hunyuan(**settings: Any) -> Any:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(
        num_single_layers=2, pooled_projection_dim=TEXT, guidance_embeds=False, **HUNYUAN, **settings
    )


def _hunyuan_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        **_inputs(batch, rows, columns),
        "encoder_attention_mask": text_masks(batch),
        "pooled_projections": noise(batch, TEXT),
    }


def _hunyuan_15() -> Any:
    from diffusers import HunyuanVideo15Transformer3DModel

    return HunyuanVideo15Transformer3DModel(patch_size=2, text_embed_2_dim=12, image_embed_dim=8, **HUNYUAN)


def _hunyuan_15_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        **_inputs(batch, rows, columns),
        "encoder_attention_mask": text_masks(batch),
        "encoder_hidden_states_2": noise(batch, WORDS, 12),
        "encoder_attention_mask_2": text_masks(batch + 1)[1:],
        "image_embeds": noise(batch, 5, 8),
    }


COGVIDEOX = {
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 16,
    "text_embed_dim": TEXT,
    "num_layers": 2,
    "sample_width": 16,
    "sample_height": 16,
    "sample_frames": 9,
    "max_text_seq_length": WORDS,
    **HEADS,
}


def _cogvideox(**settings: Any) -> Any:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(**COGVIDEOX, **settings)


def _consisid() -> Any:
    from diffusers import ConsisIDTransformer3DModel

    return ConsisIDTransformer3DModel(use_rotary_positional_embeddings=True, **COGVIDEOX)


def _cogvideox_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        **_inputs(batch, rows, columns),
        "hidden_states": noise(batch, FRAMES, 4, 2 * rows, 2 * columns),
    }


def _rotary_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    angles = torch.randn(FRAMES * rows * columns, 8, generator=torch.Generator().manual_seed(0))
    return {**_cogvideox_inputs(batch, rows, columns), "image_rotary_emb": (angles.cos(), angles.sin())}


def _two_frames_a_patch(batch: int, rows: int, columns: int) -> dict[str, Any]:
    inputs = _rotary_inputs(batch, rows, columns)
    return {**inputs, "hidden_states": noise(batch, 2 * FRAMES, 4, 2 * rows, 2 * columns)}


def _easyanimate(**settings: Any) -> Any:
    from diffusers import EasyAnimateTransformer3DModel

    return EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=TEXT,
        num_layers=2,
        sample_width=16,
        sample_height=16,
        mmdit_layers=1,
        patch_size=2,
        **settings,
    )


def _mochi() -> Any:
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=TEXT,
        time_embed_dim=16,
        max_sequence_length=WORDS,
        **HEADS,
    )


def _mochi_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {**_inputs(batch, rows, columns), "encoder_attention_mask": text_masks(batch)}


def _ltx() -> Any:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=2, caption_channels=TEXT, **HEADS
    )


def _ltx_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, FRAMES * rows * columns, 4),
        "timestep": torch.full((batch, 1), 500.0),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "encoder_attention_mask": text_masks(batch),
        "num_frames": FRAMES,
        "height": rows,
        "width": columns,
    }


def _ltx_from_a_picture(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Tokens of an image before those of the video, each with its own timestep and coordinates."""
    inputs = _ltx_inputs(batch, rows, columns)
    sides = [torch.arange(float(side)) for side in (FRAMES, rows, columns)]
    video = torch.cartesian_prod(*sides).T
    picture = video[:, : rows * columns]
    coordinates = torch.cat([picture, video], dim=1)
    times = torch.cat([torch.zeros(picture.shape[1]), torch.full((video.shape[1],), 500.0)])
    return {
        **inputs,
        "hidden_states": noise(batch, coordinates.shape[1], 4),
        "timestep": times.repeat(batch, 1),
        "video_coords": coordinates.repeat(batch, 1, 1),
    }


def _ltx2(**settings: Any) -> Any:
    from diffusers import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=12,
        cross_attention_dim=48,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=4,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=32,
        num_layers=2,
        caption_channels=TEXT,
        **settings,
    )


def _ltx2_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        **_ltx_inputs(batch, rows, columns),
        "audio_hidden_states": noise(batch, SOUND, 4),
        "audio_encoder_hidden_states": noise(batch, WORDS, TEXT).flip(1),
        "audio_encoder_attention_mask": text_masks(batch),
        "audio_num_frames": SOUND,
        "sigma": torch.full((batch,), 500.0),
    }


def _ltx2_with_keyframes(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Tokens of a given frame behind those of the video, which know their place; some hardly attend to it.

    The text is projected already.
    """
    inputs = _ltx2_inputs(batch, rows, columns)
    sides = [torch.arange(float(side)) for side in (FRAMES, rows, columns)]
    video = torch.cartesian_prod(*sides).T
    frame = video[:, : rows * columns].clone()
    frame[0] = 0.5
    starts = torch.cat([video, frame], dim=1)
    tokens = starts.shape[1]
    times = torch.linspace(400, 500, tokens).repeat(batch, 1)
    times[:, video.shape[1] :] = 0
    mask = torch.ones(batch, tokens, tokens)
    mask[:, : rows * columns, video.shape[1] :] = 0.5
    return {
        **inputs,
        "hidden_states": noise(batch, tokens, 4),
        "encoder_hidden_states": noise(batch, WORDS, 48),
        "audio_encoder_hidden_states": noise(batch, WORDS, 32),
        "timestep": times,
        "audio_timestep": torch.full((batch,), 500.0),
        "video_coords": torch.stack([starts, starts + 1], dim=-1).repeat(batch, 1, 1, 1),
        "video_self_attention_mask": mask,
    }


def _sana_video() -> Any:
    from diffusers import SanaVideoTransformer3DModel

    return SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=TEXT,
    )


def _sana_video_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {**_inputs(batch, rows, columns), "encoder_attention_mask": text_masks(batch)}


def _cosmos(**more: Any) -> Any:
    from diffusers import CosmosTransformer3DModel

    return CosmosTransformer3DModel(
        **more,
        in_channels=5,
        out_channels=4,
        num_layers=2,
        text_embed_dim=TEXT,
        adaln_lora_dim=4,
        max_size=(16, 32, 32),
        concat_padding_mask=False,
        num_attention_heads=2,
        attention_head_dim=16,
    )


def _cosmos_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    mask = torch.zeros(batch, 1, FRAMES, 2 * rows, 2 * columns)
    mask[:, :, :1] = 1
    return {**_inputs(batch, rows, columns), "condition_mask": mask}


def _cosmos_controlled_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Each frame has a timestep of its own, and a ControlNet adds to the tokens of each block."""
    times = torch.tensor([0.1, 0.3, 0.5]).view(1, 1, FRAMES, 1, 1).repeat(batch, 1, 1, 1, 1)
    added = list(noise(batch, 2, FRAMES * rows * columns, 32).unbind(1))
    return {
        **_cosmos_inputs(batch, rows, columns),
        "timestep": times,
        "block_controlnet_hidden_states": added,
    }


def _allegro() -> Any:
    from diffusers import AllegroTransformer3DModel

    return AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        cross_attention_dim=24,
        sample_width=16,
        sample_height=16,
        sample_frames=FRAMES,
        caption_channels=TEXT,
    )


def _allegro_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    sides = (FRAMES, rows, columns)
    places = torch.cartesian_prod(*(torch.arange(side) for side in sides)).T.unsqueeze(1)
    tables = [torch.randn(side, 4, generator=torch.Generator().manual_seed(side)) for side in sides]
    # The last column of the second image is masked.
    mask = torch.ones(batch, FRAMES, 2 * rows, 2 * columns)
    mask[1:2, ..., -2:] = 0
    return {
        **_inputs(batch, rows, columns),
        "attention_mask": mask,
        "encoder_attention_mask": text_masks(batch),
        "image_rotary_emb": (tuple((t.cos(), t.sin()) for t in tables), tuple(places)),
    }


def _kandinsky5() -> Any:
    from diffusers import Kandinsky5Transformer3DModel

    return Kandinsky5Transformer3DModel(
        in_text_dim=TEXT,
        in_text_dim2=TEXT,
        time_dim=16,
        model_dim=24,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 4, 4),
    )


def _kandinsky5_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, FRAMES, 2 * rows, 2 * columns, 4),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "timestep": torch.full((batch,), 500.0),
        "pooled_projections": noise(batch, TEXT),
        "visual_rope_pos": [torch.arange(side) for side in (FRAMES, rows, columns)],
        "text_rope_pos": torch.arange(WORDS),
        "return_dict": True,
    }


VIDEO: dict[str, Any] = {"frames": FRAMES}


FAMILIES: dict[str, Family] = {
    "WanVACETransformer3DModel": Family(_vace, _vace_inputs, **VIDEO),
    "WanAnimateTransformer3DModel": Family(_animate, _animate_inputs, **VIDEO),
    "SkyReelsV2Transformer3DModel": Family(_skyreels, _skyreels_inputs, **VIDEO),
    "SkyReelsV2Transformer3DModel by blocks of frames": Family(_skyreels_causal, _causal_inputs, frames=4),
    "SkyReelsV2Transformer3DModel, times of frames": Family(
        lambda: _skyreels(inject_sample_info=False), _frames_with_times, **VIDEO
    ),
    "WanTransformer3DModel, times of tokens": Family(_wan_22, _tokens_with_times, **VIDEO),
    "ChronoEditTransformer3DModel": Family(_chronoedit, _inputs, **VIDEO),
    "HunyuanVideoTransformer3DModel": Family(_hunyuan, _hunyuan_inputs, **VIDEO),
    "HunyuanVideoTransformer3DModel from an image": Family(
        lambda: _hunyuan(image_condition_type="token_replace"), _hunyuan_inputs, **VIDEO
    ),
    "HunyuanVideo15Transformer3DModel": Family(_hunyuan_15, _hunyuan_15_inputs, **VIDEO),
    "CogVideoXTransformer3DModel": Family(
        lambda: _cogvideox(use_rotary_positional_embeddings=True), _rotary_inputs, **VIDEO
    ),
    "CogVideoXTransformer3DModel 1.5": Family(
        lambda: _cogvideox(use_rotary_positional_embeddings=True, patch_size_t=2),
        _two_frames_a_patch,
        **VIDEO,
    ),
    "CogVideoXTransformer3DModel without rotary positions": Family(_cogvideox, _cogvideox_inputs, **VIDEO),
    "ConsisIDTransformer3DModel": Family(_consisid, _rotary_inputs, **VIDEO),
    "EasyAnimateTransformer3DModel": Family(_easyanimate, _inputs, **VIDEO),
    "MochiTransformer3DModel": Family(_mochi, _mochi_inputs, **VIDEO),
    "LTXVideoTransformer3DModel": Family(_ltx, _ltx_inputs, **VIDEO),
    "LTXVideoTransformer3DModel from an image": Family(_ltx, _ltx_from_a_picture, **VIDEO),
    "LTX2VideoTransformer3DModel": Family(_ltx2, _ltx2_inputs, **VIDEO),
    "LTX2VideoTransformer3DModel with a keyframe": Family(
        lambda: _ltx2(
            rope_type="split",
            cross_attn_mod=True,
            audio_cross_attn_mod=True,
            gated_attn=True,
            audio_gated_attn=True,
            use_prompt_embeddings=False,
            perturbed_attn=True,
        ),
        _ltx2_with_keyframes,
        **VIDEO,
    ),
    "SanaVideoTransformer3DModel": Family(_sana_video, _sana_video_inputs, **VIDEO),
    "CosmosTransformer3DModel": Family(_cosmos, _cosmos_inputs, **VIDEO),
    "CosmosTransformer3DModel with a ControlNet": Family(
        lambda: _cosmos(controlnet_block_every_n=1), _cosmos_controlled_inputs, **VIDEO
    ),
    "AllegroTransformer3DModel": Family(_allegro, _allegro_inputs, **VIDEO),
    "Kandinsky5Transformer3DModel": Family(_kandinsky5, _kandinsky5_inputs, **VIDEO),
}
