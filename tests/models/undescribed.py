"""A tiny random model of each class whose blocks no family describes, with a call of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from tests.models.dits import FAMILIES
from tests.models.family import noise, seeded
from torch import Tensor

Inputs = Callable[[int], dict[str, Any]]  # (batch) → the arguments of a call

TEXT = 6

# By class, the arguments with which the smallest model is built.
CONFIGS: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "in_channels": 24,
        "audio_acoustic_hidden_dim": 8,
        "sliding_window": 16,
    },
    "AnyFlowTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
        "gate_value": 0.25,
        "deltatime_type": "r",
    },
    "BriaFibo2Transformer2DModel": {
        "in_channels": 4,
        "dim": 24,
        "n_layers": 3,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "cap_feat_dim": 16,
        "injection_layer_ids": (1,),
        "perceiver_num_layers": 1,
        "min_num_gist_tokens": 4,
        "max_num_gist_tokens": 8,
        "gist_step": 4,
        "gist_min_text_len": 4,
        "gist_max_text_len": 16,
        "axes_dims": (4, 4, 4),
        "axes_lens": (64, 32, 32),
    },
    "Cosmos3OmniTransformer": {
        "head_dim": 6,
        "hidden_act": "relu2",
        "hidden_size": 12,
        "intermediate_size": 24,
        "latent_channel": 2,
        "latent_patch_size": 1,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "patch_latent_dim": 2,
        "qk_norm_for_text": False,
        "rope_axes_dim": [1, 1, 1],
        "rope_theta": 1e8,
        "vocab_size": 32,
    },
    "Flux3Transformer2DModel": {
        "in_channels": 4,
        "cond_in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (2, 2, 2, 2),
    },
    "GlmImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "text_embed_dim": 32,
        "time_embed_dim": 16,
        "condition_dim": 8,
        "prior_vq_quantizer_codebook_size": 64,
    },
    "HeliosTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_dim": (4, 4, 4),
        "has_multi_term_memory_patch": True,
        "guidance_cross_attn": True,
        "zero_history_timestep": True,
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
        "has_image_proj": True,
        "image_proj_dim": 16,
        "has_clean_x_embedder": True,
    },
    "Kandinsky6SRTransformer3DModel": {
        "in_visual_dim": 2,
        "out_visual_dim": 4,
        "time_dim": 16,
        "model_dim": 24,
        "ff_dim": 32,
        "num_visual_blocks": 2,
        "axes_dims": (4, 4, 4),
        "nabla_window": (3, 3, 3),
    },
    "Kandinsky6Transformer3DModel": {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 16,
        "in_text_dim2": 8,
        "time_dim": 16,
        "model_dim": 24,
        "ff_dim": 32,
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
        "axes_dims": (4, 4, 4),
        "visual_cond": False,
        "in_audio_dim": 4,
        "out_audio_dim": 4,
        "model_dim_a": 24,
        "time_dim_a": 16,
        "ff_dim_a": 32,
        "axes_dims_a": (4, 4, 4),
    },
    "Kandinsky3UNet": {
        "time_embedding_dim": 16,
        "groups": 4,
        "attention_head_dim": 8,
        "layers_per_block": 2,
        "block_out_channels": (16, 16, 16, 16),
        "cross_attention_dim": 16,
        "encoder_hid_dim": 16,
    },
    "LongCatAudioDiTTransformer": {
        "dit_dim": 64,
        "dit_depth": 2,
        "dit_heads": 4,
        "dit_text_dim": 32,
        "latent_dim": 8,
        "text_conv": False,
    },
    "MiniMaxH3Transformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "hidden_size": 24,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "ffn_dim": 32,
        "in_channels": 4,
        "audio_in_channels": 6,
        "patch_size": (1, 2, 2),
        "text_dim": 8,
        "freq_dim": 8,
        "time_embed_hidden_dim": 24,
        "time_embed_dim": 16,
        "rope_freq_dim": 2,
    },
    "MiniMaxMusic3Transformer1DModel": {
        "in_channels": 8,
        "condition_dim": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "ff_inner_dim": 32,
        "rotary_dim": 4,
        "fourier_embedding_dim": 8,
    },
    "MotifVideoTransformer3DModel": {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 1,
        "num_single_layers": 3,
        "num_decoder_layers": 1,
        "patch_size": 1,
        "text_embed_dim": 16,
        "image_embed_dim": 4,
        "rope_axes_dim": (4, 4, 4),
    },
    "NucleusMoEImageTransformer2DModel": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 16,
        "axes_dims_rope": (8, 4, 4),
        "moe_enabled": False,
        "capacity_factors": [8.0, 8.0],
    },
    "OmniGenTransformer2DModel": {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "num_layers": 2,
        "pad_token_id": 0,
        "vocab_size": 100,
        "in_channels": 4,
        "time_step_dim": 4,
        "rope_scaling": {"long_factor": [1, 2], "short_factor": [1, 2]},
    },
    "PriorTransformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "embedding_dim": 16,
        "num_embeddings": TEXT,
        "additional_embeddings": 4,
    },
    "SanaWMTransformer3DModel": {
        "in_channels": 4,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "linear_head_dim": 8,
        "caption_channels": 16,
        "softmax_every_n": 2,  # blocks of both kinds of attention
        "chunk_plucker_channels": 6,
        "chunk_plucker_post_attn_blocks": -1,
    },
    "StableAudio3DiTModel": {
        "io_channels": 8,
        "patch_size": 1,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 4,
        "cond_token_dim": 16,
        "global_cond_dim": 12,
        "local_add_cond_dim": 5,
        "timestep_features_dim": 16,
        "ff_mult": 2,
        "num_memory_tokens": 3,
        "use_differential_attention": False,
    },
    "StableAudioDiTModel": {
        "sample_size": 8,
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_attention_heads": 2,
        "out_channels": 4,
        "cross_attention_dim": 16,
        "time_proj_dim": 16,
        "global_states_input_dim": 12,
        "cross_attention_input_dim": 16,
    },
    "StableCascadeUNet": {
        "in_channels": 4,
        "out_channels": 4,
        "timestep_ratio_embedding_dim": 8,
        "conditioning_dim": 16,
        "block_out_channels": (8, 16),
        "num_attention_heads": (1, 2),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "clip_text_pooled_in_channels": 16,
        "timestep_conditioning_type": ("sca",),
    },
    "T5FilmDecoder": {
        "input_dims": 8,
        "targets_length": 16,
        "d_model": 16,
        "num_layers": 2,
        "num_heads": 2,
        "d_kv": 8,
        "d_ff": 32,
    },
    "UNet1DModel": {
        "in_channels": 4,
        "out_channels": 4,
        "extra_in_channels": 64,
        "block_out_channels": (32, 32),
        "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
        "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
        "mid_block_type": "UNetMidBlock1D",
    },
    "UNet2DModel": {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (8, 8),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
    },
    "UNetFlatConditionModel": {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlockFlat", "CrossAttnDownBlockFlat"),
        "up_block_types": ("CrossAttnUpBlockFlat", "UpBlockFlat"),
        "cross_attention_dim": 16,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
    },
    "WanAnimate2Transformer3DModel": {
        "text_len": 16,
        "in_dim": 36,
        "dim": 32,
        "ffn_dim": 32,
        "freq_dim": 16,
        "text_dim": 32,
        "out_dim": 16,
        "num_heads": 2,
        "num_layers": 2,
        "use_img_emb": True,
    },
}
CONFIGS["WuerstchenDiffNeXt"] = {
    "c_in": 4,
    "c_out": 4,
    "c_r": 8,
    "c_cond": 16,
    "c_hidden": [8, 16],
    "nhead": [-1, 2],
    "blocks": [1, 1],
    "level_config": ["CT", "CTA"],
    "inject_effnet": [False, True],
    "effnet_embd": 4,
    "clip_embd": 16,
}
CONFIGS["WuerstchenPrior"] = {"c_in": 4, "c": 16, "c_cond": 16, "c_r": 8, "depth": 2, "nhead": 2}
CONFIGS["ZImageControlNetModel"] = {
    "control_layers_places": [0, 1],
    "control_refiner_layers_places": [0],
    "control_in_dim": 4,
    "add_control_noise_refiner": "control_noise_refiner",
    "dim": 32,
    "n_refiner_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 4,
}
CONFIGS["AnyFlowFARTransformer3DModel"] = {
    **CONFIGS["AnyFlowTransformer3DModel"],
    "compressed_patch_size": (1, 4, 4),
    "full_chunk_limit": 3,
}
Z_IMAGE = FAMILIES["ZImageTransformer2DModel"]


def steps(batch: int, value: float = 500.0) -> Tensor:
    return torch.full((batch,), value)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def _anyflow(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 2, 4, 8, 8),
        "timestep": steps(batch)[:, None].expand(batch, 2),
        "r_timestep": steps(batch, 250.0)[:, None].expand(batch, 2),
        "encoder_hidden_states": noise(batch, TEXT, 16),
    }


def _cosmos3(batch: int) -> dict[str, Any]:
    places = torch.arange(2, 18)
    return {
        "input_ids": torch.tensor([1, 2]),
        "text_indexes": torch.tensor([0, 1]),
        "position_ids": torch.arange(18).expand(3, 18),
        "und_len": 2,
        "sequence_length": 18,
        "vision_tokens": [noise(1, 2, 1, 4, 4)],
        "vision_token_shapes": [(1, 4, 4)],
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": places,
        "vision_timesteps": steps(16),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }


def _framepack(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 3, 4, 4),
        "timestep": steps(batch),
        "encoder_hidden_states": noise(batch, TEXT, 16),
        "pooled_projections": noise(batch, 8),
        "encoder_attention_mask": ones(batch, TEXT),
        "guidance": steps(batch),
        "image_embeds": noise(batch, TEXT, 16),
        "indices_latents": ones(3),
        "latents_clean": noise(batch, 4, 2, 4, 4),
        "indices_latents_clean": ones(2),
        "latents_history_2x": noise(batch, 4, 2, 4, 4),
        "indices_latents_history_2x": ones(2),
        "latents_history_4x": noise(batch, 4, 8, 4, 4),
        "indices_latents_history_4x": ones(8),
    }


def _helios(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 2, 8, 8),
        "timestep": steps(batch).long(),
        "encoder_hidden_states": noise(batch, TEXT, 16),
        "indices_hidden_states": ones(batch, 2),
        "indices_latents_history_short": ones(batch, 1),
        "indices_latents_history_mid": ones(batch, 1),
        "indices_latents_history_long": ones(batch, 4),
        "latents_history_short": noise(batch, 4, 1, 8, 8),
        "latents_history_mid": noise(batch, 4, 1, 8, 8),
        "latents_history_long": noise(batch, 4, 4, 8, 8),
    }


def _minimax_h3(batch: int) -> dict[str, Any]:
    kinds = torch.tensor([1] * 4 + [2] * 6 + [0] * 8)  # text, sound, video
    return {
        "hidden_states": noise(batch, 8, 16),
        "audio_hidden_states": noise(batch, 6, 6),
        "encoder_hidden_states": noise(batch, 4, 8),
        "timestep": torch.tensor([0.7, 0.3]),
        "timestep_indices": (kinds == 2).long(),
        "token_tags": kinds,
        "position_ids": torch.arange(18.0)[:, None].expand(18, 3).clone(),
        "video_indices": torch.arange(10, 18),
        "audio_indices": torch.arange(4, 10),
        "text_indices": torch.arange(4),
    }


def _omnigen(batch: int) -> dict[str, Any]:
    tokens = TEXT + 1 + 16
    return {
        "hidden_states": noise(batch, 4, 8, 8),
        "timestep": steps(batch, 0.5),
        "input_ids": torch.arange(TEXT).expand(batch, TEXT).clone(),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": ones(batch, tokens, tokens),
        "position_ids": torch.arange(tokens).expand(batch, tokens).clone(),
    }


def _sana_wm(batch: int) -> dict[str, Any]:
    frames = 3
    pose = torch.eye(4).flatten().expand(batch, frames, 16)
    lens = torch.tensor([3.0, 3.0, 2.0, 2.0]).expand(batch, frames, 4)
    times = steps(batch)[:, None, None].repeat(1, 1, frames)
    times[:, :, 0] = 0  # the given image
    return {
        "hidden_states": noise(batch, 4, frames, 4, 4),
        "timestep": times,
        "encoder_hidden_states": noise(batch, 1, TEXT, 16),
        "mask": ones(batch, TEXT),
        "camera_conditions": torch.cat([pose, lens], dim=-1),
        "chunk_plucker": noise(batch, 6, frames, 4, 4),
    }


def _t5(batch: int) -> dict[str, Any]:
    return {
        "encodings_and_masks": [(noise(batch, TEXT, 16), ones(batch, TEXT))],
        "decoder_input_tokens": noise(batch, 16, 8),
        "decoder_noise_time": steps(batch, 0.5),
    }


def _wan_animate(batch: int) -> dict[str, Any]:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [noise(16, 2, 4, 4)],
        "timestep": steps(1),
        "encoder_hidden_states": [noise(8, 32)],
        "condition_latents": [noise(20, 2, 4, 4)],
        "encoder_hidden_states_image": noise(1, 4, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 8,
        "offset_grid_sizes": torch.tensor([[2, 2, 2]]),
    }


INPUTS: dict[str, Inputs] = {
    "AceStepTransformer1DModel": lambda b: {
        "hidden_states": noise(b, 8, 8),
        "timestep": steps(b, 0.5),
        "timestep_r": steps(b, 0.25),
        "encoder_hidden_states": noise(b, TEXT, 32),
        "context_latents": noise(b, 8, 16),
    },
    "AnyFlowTransformer3DModel": _anyflow,
    "AnyFlowFARTransformer3DModel": lambda b: {**_anyflow(b), "chunk_partition": [1, 1]},
    "BriaFibo2Transformer2DModel": lambda b: {
        "hidden_states": noise(b, 4, 8, 8),
        "timestep": steps(b, 0.5),
        "encoder_hidden_states": noise(b, 2, TEXT, 16),
    },
    "Cosmos3OmniTransformer": _cosmos3,
    "Flux3Transformer2DModel": lambda b: {
        "hidden_states": noise(b, 16, 4),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "timestep": steps(b, 0.5),
        "img_ids": torch.arange(16.0)[:, None].expand(16, 4),
        "txt_ids": torch.zeros(TEXT, 4),
    },
    "GlmImageTransformer2DModel": lambda b: {
        "hidden_states": noise(b, 4, 8, 8),
        "encoder_hidden_states": noise(b, TEXT, 32),
        "prior_token_id": torch.arange(16).expand(b, 16),
        "prior_token_drop": torch.zeros(b, 16, dtype=torch.bool),
        "timestep": steps(b),
        "target_size": torch.full((b, 2), 8.0),
        "crop_coords": torch.zeros(b, 2),
    },
    "HeliosTransformer3DModel": _helios,
    "HunyuanVideoFramepackTransformer3DModel": _framepack,
    "Kandinsky6SRTransformer3DModel": lambda b: {"hidden_states": noise(b, 1, 8, 8, 5), "timestep": steps(b)},
    "Kandinsky6Transformer3DModel": lambda b: {
        "hidden_states": noise(b, 1, 8, 8, 4),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "pooled_projections": noise(b, 8),
        "timestep": steps(b),
        "audio_hidden_states": noise(b, 5, 4),
    },
    "Kandinsky3UNet": lambda b: {
        "sample": noise(b, 4, 8, 8),
        "timestep": steps(b),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "encoder_attention_mask": ones(b, TEXT),
    },
    "LongCatAudioDiTTransformer": lambda b: {
        "hidden_states": noise(b, 16, 8),
        "encoder_hidden_states": noise(b, TEXT, 32),
        "encoder_attention_mask": ones(b, TEXT).bool(),
        "attention_mask": ones(b, 16).bool(),
        "timestep": steps(b, 0.5),
    },
    "MiniMaxH3Transformer3DModel": _minimax_h3,
    "MiniMaxMusic3Transformer1DModel": lambda b: {
        "hidden_states": noise(b, 8, 24),
        "encoder_hidden_states": noise(b, 24, 16),
        "timestep": steps(b, 0.5),
    },
    "MotifVideoTransformer3DModel": lambda b: {
        "hidden_states": noise(b, 9, 2, 4, 4),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "timestep": steps(b),
    },
    "NucleusMoEImageTransformer2DModel": lambda b: {
        "hidden_states": noise(b, 16, 16),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "encoder_hidden_states_mask": torch.ones(b, TEXT, dtype=torch.long),
        "timestep": steps(b, 0.5),
        "img_shapes": [(1, 4, 4)] * b,
    },
    "OmniGenTransformer2DModel": _omnigen,
    "PriorTransformer": lambda b: {
        "hidden_states": noise(b, 16),
        "timestep": steps(b),
        "proj_embedding": noise(b, 16),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "attention_mask": ones(b, TEXT).bool(),
    },
    "SanaWMTransformer3DModel": _sana_wm,
    "StableAudio3DiTModel": lambda b: {
        "hidden_states": noise(b, 8, 16),
        "timestep": steps(b, 0.5),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "global_hidden_states": noise(b, 12),
    },
    "StableAudioDiTModel": lambda b: {
        "hidden_states": noise(b, 4, 8),
        "timestep": steps(b),
        "encoder_hidden_states": noise(b, TEXT, 16),
        "global_hidden_states": noise(b, 1, 12),
        "rotary_embedding": (noise(9, 4), noise(9, 4)),
    },
    "StableCascadeUNet": lambda b: {
        "sample": noise(b, 4, 8, 8),
        "timestep_ratio": steps(b, 0.5),
        "clip_text_pooled": noise(b, 1, 16),
    },
    "T5FilmDecoder": _t5,
    "UNet1DModel": lambda b: {"sample": noise(b, 4, 16), "timestep": steps(b)},
    "UNet2DModel": lambda b: {"sample": noise(b, 4, 8, 8), "timestep": steps(b)},
    "UNetFlatConditionModel": lambda b: {
        "sample": noise(b, 4, 4, 1),
        "timestep": steps(b),
        "encoder_hidden_states": noise(b, TEXT, 16),
    },
    "WanAnimate2Transformer3DModel": _wan_animate,
    "WuerstchenDiffNeXt": lambda b: {
        "x": noise(b, 4, 8, 8),
        "r": steps(b, 0.5),
        "effnet": noise(b, 4, 4, 4),
        "clip": noise(b, TEXT, 16),
    },
    "WuerstchenPrior": lambda b: {"x": noise(b, 4, 8, 8), "r": steps(b, 0.5), "c": noise(b, TEXT, 16)},
    "ZImageControlNetModel": lambda b: {
        **Z_IMAGE.inputs(b, 4, 4),
        "control_context": list(noise(b, 4, 1, 8, 8)),
    },
}
# The same of models that run dense in every step.
DENSE: dict[str, dict[str, Any]] = {
    "RFD4ProteinaTransformer": {
        "nlayers": 2,
        "token_dim": 16,
        "nheads": 2,
        "dim_cond": 8,
        "pair_repr_dim": 8,
        "latent_dim": 4,
        "token_type_emb_dim": 4,
        "cath_emb_dim": 4,
        "t_emb_dim": 8,
        "seq_sep_dim": 4,
        "xt_pair_dist_dim": 5,
        "tri_mult_c": 8,
    },
    "SanaWMLTX2RefinerTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 4,
        "audio_cross_attention_dim": 8,
        "num_layers": 2,
        "caption_channels": 16,
    },
}
# Pipelines, whose models a family describes.
PIPELINES = ("Flux2KleinKVPipeline", "ZImageOmniPipeline")


# Modules of classes that diffusers does not export.
PLACES = {
    "UNetFlatConditionModel": "versatile_diffusion.modeling_text_unet",
    "WuerstchenDiffNeXt": "wuerstchen.modeling_wuerstchen_diffnext",
    "WuerstchenPrior": "wuerstchen.modeling_wuerstchen_prior",
}


@functools.cache
def class_of(name: str) -> Any:
    """The class of a model in diffusers."""
    import diffusers

    place = PLACES.get(name)
    if place is not None:
        return getattr(importlib.import_module(f"diffusers.pipelines.deprecated.{place}"), name)
    return getattr(diffusers, name, None) or getattr(diffusers.models, name)


def build(name: str, **settings: Any) -> Any:
    """A small model of a class, with seeded random weights, in evaluation mode."""
    model = class_of(name)(**{**CONFIGS, **DENSE}[name] | settings)
    if name == "ZImageControlNetModel":
        model = type(model).from_transformer(model, Z_IMAGE.build())
    return seeded(model)
