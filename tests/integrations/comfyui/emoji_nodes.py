"""Nodes of ComfyUI that load the bundled models, which are too small for ComfyUI's own loaders."""

from __future__ import annotations

import functools

import comfy_hosts as hosts
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline

from tokenmerge_tools import demo


@functools.cache
def pipeline(name):
    kind = StableDiffusionPipeline if name == "emoji-unet" else StableDiffusion3Pipeline
    return kind.from_pretrained(demo.path(name))


class EmojiModel:
    CATEGORY = FUNCTION = "load"
    RETURN_TYPES = ("MODEL", "CONDITIONING", "CONDITIONING")
    INPUT_TYPES = classmethod(lambda _: {"required": {"name": (list(demo.NAMES),), "text": ("STRING", {})}})

    @torch.inference_mode()
    def load(self, name, text):
        pipe = pipeline(name)
        if name == "emoji-unet":
            given, nothing = (pipe.encode_prompt(words, "cpu", 1, False)[0] for words in (text, ""))
            return hosts.emoji_unet(pipe.unet), [[given, {}]], [[nothing, {}]]
        given, nothing, pooled, nothing_pooled = pipe.encode_prompt(text, text, text, device="cpu")
        return (
            hosts.emoji_mmdit(pipe.transformer),
            [[given, {"pooled_output": pooled}]],
            [[nothing, {"pooled_output": nothing_pooled}]],
        )


class EmojiDecode:
    CATEGORY = FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE",)
    INPUT_TYPES = classmethod(lambda _: {"required": {"name": (list(demo.NAMES),), "latent": ("LATENT",)}})

    @torch.inference_mode()
    def decode(self, name, latent):
        vae = pipeline(name).vae
        picture = vae.decode(latent["samples"] / vae.config.scaling_factor).sample
        return ((picture.permute(0, 2, 3, 1) / 2 + 0.5).clamp(0, 1),)


NODE_CLASS_MAPPINGS = {"EmojiModel": EmojiModel, "EmojiDecode": EmojiDecode}
