"""`emoji-unet`: a Stable Diffusion in miniature, trained to predict velocity."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderTiny,
    DPMSolverMultistepScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tools.training.codec import FACTOR, LATENT_CHANNELS
from tools.training.schedule import Phase
from tools.training.text import WIDTH, build_tokenizer, encode, load_exported_encoder, text_config
from torch import Tensor, nn
from transformers import CLIPTextModel

from tokenmerge import presets

NATIVE_SIZE = 128
# With a quarter of the keys in self-attention, a step at 256 × 256 takes half the time.
TODO = presets.todo()

# Small images first: what goes where is learnt several times faster at a sixteenth of the attention's cost.
PHASES = (
    Phase(sizes=(64,), batch=32, steps=900, rate=2e-3, final_rate=1.2e-3),
    Phase(sizes=(128,), batch=16, steps=1000, rate=1.0e-3, final_rate=5e-5),
    Phase(sizes=(256, 256, 128), batch=8, steps=1500, rate=8e-4, final_rate=2e-4, merging=TODO),
    Phase(sizes=(256, 128), batch=8, steps=250, rate=2e-4, final_rate=2e-5),
)


class EmojiUNet(nn.Module):
    """The parts that are trained, with their loss.

    Attention at every level and one head count for all of them are Stable Diffusion 1.5's layout. Four heads
    rather than eight: heads of 8 channels run three times slower on a CPU than heads of 16.
    """

    name = "emoji-unet"
    phases = PHASES
    native_size = NATIVE_SIZE

    def __init__(self, captions: list[str]) -> None:
        super().__init__()
        self.tokenizer = build_tokenizer(captions)
        self.text_encoder = CLIPTextModel(text_config(self.tokenizer, WIDTH))
        self.unet = UNet2DConditionModel(
            sample_size=NATIVE_SIZE // FACTOR,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            block_out_channels=(64, 96, 128),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",) * 3,
            mid_block_type="UNetMidBlock2DCrossAttn",
            up_block_types=("CrossAttnUpBlock2D",) * 3,
            cross_attention_dim=WIDTH,
            attention_head_dim=4,  # diffusers' name for the number of heads
        )
        # With zero signal in the last step, the noise holds no hint of the image's mean colour; a model
        # that has seen such a hint in training cannot draw clean white or black backgrounds without it.
        self.scheduler = DPMSolverMultistepScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            steps_offset=1,  # unused with this spacing; StableDiffusionPipeline warns about any other value
        )

    @property
    def denoiser(self) -> UNet2DConditionModel:
        """What tokens merge in."""
        return self.unet

    def loss(self, latents: Tensor, captions: list[str]) -> Tensor:
        """Return the mean squared error of the predicted velocity, for latents [b, c, h, w]."""
        noise = torch.randn_like(latents)
        signals = self.scheduler.alphas_cumprod.to(latents.device)
        # Most draws are of much noise, where the text alone must say what goes where; cleaning up an image
        # with little noise is learnt much sooner. At the native size half of them fall into the noisiest 30 %
        # of the steps, at twice the size into the noisiest 20 %: neighbours average the noise away, so that
        # it takes more to hide what is where.
        evenness = 1 / (1 + latents.shape[-1] / self.unet.config.sample_size)
        steps = (len(signals) * torch.rand(latents.shape[0], device=latents.device) ** evenness).long()
        steps = steps.clamp(max=len(signals) - 1)  # what is nearly 1 is rounded up to it
        signal = signals[steps].view(-1, 1, 1, 1)
        alpha, sigma = signal.sqrt(), (1 - signal).sqrt()
        text = encode(self.tokenizer, self.text_encoder, captions)
        predicted = self.unet(alpha * latents + sigma * noise, steps, text).sample
        return F.mse_loss(predicted.float(), alpha * noise - sigma * latents)

    def load_exported(self, folder: Path) -> None:
        """Take over the weights of an exported model."""
        unet = UNet2DConditionModel.from_pretrained(folder / "unet")
        self.unet.load_state_dict(unet.state_dict())
        load_exported_encoder(self.text_encoder, self.tokenizer, folder / "text_encoder")

    def pipeline(self, codec: AutoencoderTiny) -> StableDiffusionPipeline:
        """Assemble the pipeline that users load."""
        return StableDiffusionPipeline(
            vae=codec,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            unet=self.unet,
            scheduler=self.scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
