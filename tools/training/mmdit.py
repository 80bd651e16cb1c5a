"""`emoji-mmdit`: a Stable Diffusion 3 in miniature, trained by flow matching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tools.training.codec import FACTOR, LATENT_CHANNELS
from tools.training.schedule import Phase
from tools.training.text import build_tokenizer, load_exported_encoder, text_config
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5Tokenizer

NATIVE_SIZE, SECOND_SIZE = 128, 256
WIDTHS = (128, 32)  # of the two text encoders; the pipeline joins them, as that of Stable Diffusion 3 does
JOINED = sum(WIDTHS)
T5_TOKENS = 256  # which the pipeline adds to those of the other two
SHIFT = 2.0  # towards noise, where the text alone must say what goes where

SECOND_SHARE = 0.3  # of the steps in which smaller images stand for those of the second size

# Nearly all is learnt on few tokens, which stand for those of the larger sizes: see `standing_for`.
PHASES = (
    Phase(sizes=(64,), batch=48, steps=2100, rate=2e-3, final_rate=1e-3),
    Phase(sizes=(128,), batch=16, steps=360, rate=1e-3, final_rate=1e-4),
    Phase(sizes=(256, 128), batch=8, steps=200, rate=3e-4, final_rate=2e-5),
)


class EmojiMMDiT(nn.Module):
    """The parts that are trained, with their loss.

    All text features are those of two CLIP encoders. `StableDiffusion3Pipeline` does not load without T5, so
    there is the smallest one, whose output is zero.
    """

    name = "emoji-mmdit"
    phases = PHASES
    native_size = NATIVE_SIZE

    def __init__(self, captions: list[str]) -> None:
        super().__init__()
        self.tokenizer = build_tokenizer(captions)
        self.text_encoder, self.text_encoder_2 = (
            CLIPTextModelWithProjection(text_config(self.tokenizer, width)) for width in WIDTHS
        )
        # Without extra ids all text is one unknown token after another; T5 needs a feature width and no more.
        self.tokenizer_3 = T5Tokenizer(extra_ids=0, model_max_length=T5_TOKENS)
        self.text_encoder_3 = T5EncoderModel(
            T5Config(
                vocab_size=len(self.tokenizer_3), d_model=JOINED, d_kv=1, d_ff=1, num_layers=1, num_heads=1
            )
        ).requires_grad_(False)
        nn.init.zeros_(self.text_encoder_3.encoder.final_layer_norm.weight)
        self.transformer = SD3Transformer2DModel(
            sample_size=NATIVE_SIZE // FACTOR,
            patch_size=1,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=6,
            attention_head_dim=32,
            num_attention_heads=5,
            joint_attention_dim=JOINED,
            caption_projection_dim=5 * 32,
            pooled_projection_dim=JOINED,
            pos_embed_max_size=SECOND_SIZE // FACTOR,
            qk_norm="rms_norm",
        )
        self.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
        # Blocks that change nothing at first (arXiv 2212.09748, section 3.2) learn faster.
        for block in self.transformer.transformer_blocks:
            for norm in (block.norm1, block.norm1_context):
                nn.init.zeros_(norm.linear.weight)
                nn.init.zeros_(norm.linear.bias)
        nn.init.zeros_(self.transformer.proj_out.weight)

    @property
    def denoiser(self) -> SD3Transformer2DModel:
        """What tokens merge in."""
        return self.transformer

    def loss(self, latents: Tensor, captions: list[str]) -> Tensor:
        """Return the mean squared error of the predicted velocity, for latents [b, c, h, w]."""
        noise = torch.randn_like(latents)
        # Logit-normal draws (arXiv 2403.03206, section 3.1), shifted as the scheduler shifts its steps.
        uniform = torch.randn(latents.shape[0], device=latents.device).sigmoid()
        sigma = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
        share = sigma.view(-1, 1, 1, 1)
        side = latents.shape[-1]
        is_second = side * FACTOR > NATIVE_SIZE or torch.rand(()).item() < SECOND_SHARE
        size = SECOND_SIZE if is_second else NATIVE_SIZE
        # Fewer image tokens get fewer zeros, so that both keep their weight in the attention.
        text, pooled = self._encode(captions, zeros=T5_TOKENS * side**2 // (size // FACTOR) ** 2)
        with self.standing_for(size, side):
            predicted = self.transformer(
                hidden_states=(1 - share) * latents + share * noise,
                timestep=sigma * self.scheduler.config.num_train_timesteps,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        return F.mse_loss(predicted.float(), noise - latents)

    @contextmanager
    def standing_for(self, size: int, side: int) -> Iterator[None]:
        """Give latents of side × side the positions of an image of `size` × `size` pixels.

        Each latent takes the mean position of those that it stands for. A transformer knows where a token is
        by its position alone: without this, a small image would be the middle of a larger one, and what is
        learnt there of little use for the whole.
        """
        embedding = self.transformer.pos_embed
        positions, most = embedding.pos_embed, embedding.pos_embed_max_size
        whole, start = size // FACTOR, (most - size // FACTOR) // 2
        grid = positions.view(1, most, most, -1).permute(0, 3, 1, 2)
        part = grid[:, :, start : start + whole, start : start + whole]
        embedding.pos_embed = F.avg_pool2d(part, whole // side).flatten(2).transpose(1, 2)
        embedding.pos_embed_max_size = side
        try:
            yield
        finally:
            embedding.pos_embed, embedding.pos_embed_max_size = positions, most

    def _encode(self, captions: list[str], zeros: int) -> tuple[Tensor, Tensor]:
        """Encode captions as the pipeline does: [b, MAX_TOKENS + zeros, JOINED] and [b, JOINED]."""
        ids = self.tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
        encoders = (self.text_encoder, self.text_encoder_2)
        found = [encoder(ids.to(encoder.device), output_hidden_states=True) for encoder in encoders]
        text = torch.cat([output.hidden_states[-2] for output in found], dim=-1)
        text = torch.cat([text, text.new_zeros(len(captions), zeros, JOINED)], dim=1)  # zeros: T5's output
        return text, torch.cat([output.text_embeds for output in found], dim=-1)

    def load_exported(self, folder: Path) -> None:
        """Take over the weights of an exported model."""
        transformer = SD3Transformer2DModel.from_pretrained(folder / "transformer")
        self.transformer.load_state_dict(transformer.state_dict())
        for name in ("text_encoder", "text_encoder_2"):
            load_exported_encoder(getattr(self, name), self.tokenizer, folder / name)

    def pipeline(self, codec: AutoencoderTiny) -> StableDiffusion3Pipeline:
        """Assemble the pipeline that users load."""
        return StableDiffusion3Pipeline(
            transformer=self.transformer,
            scheduler=self.scheduler,
            vae=codec,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            text_encoder_2=self.text_encoder_2,
            tokenizer_2=self.tokenizer,
            text_encoder_3=self.text_encoder_3,
            tokenizer_3=self.tokenizer_3,
        )
