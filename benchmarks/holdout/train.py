"""Train the hold-out: a FLUX in miniature that draws the photographs of scikit-image.

No number of the default method is fitted on this model. It differs from both bundled models in its data
(photographs and textures), its class (`FluxTransformer2DModel`, with double and single blocks and rotary
positions) and its guidance (none). Its codec is that of the bundled models. Training goes on from its last
checkpoint.

    python -m benchmarks.holdout.train train
    python -m benchmarks.holdout.train export benchmarks/holdout/photo-flux
    python -m benchmarks.holdout.train sheet benchmarks/holdout/photo-flux --out sheet.png
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from skimage import data
from tools.training import checkpoint
from tools.training.codec import FACTOR, LATENT_CHANNELS, to_tensor
from tools.training.export import edit_config
from tools.training.muon import build_optimisers
from tools.training.schedule import Phase, at_step, total_steps
from tools.training.text import build_tokenizer, text_config
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

import tokenmerge_tools.demo

# Function of skimage.data → what the prompt calls it.
PHOTOGRAPHS = {
    "astronaut": "an astronaut",
    "brick": "bricks",
    "camera": "a cameraman",
    "cat": "a cat",
    "coffee": "a coffee cup",
    "coins": "coins",
    "colorwheel": "a color wheel",
    "grass": "grass",
    "gravel": "gravel",
    "hubble_deep_field": "galaxies",
    "immunohistochemistry": "a tissue",
    "moon": "the moon",
    "retina": "a retina",
    "rocket": "a rocket",
    "stereo_motorcycle": "a motorcycle",
}
NATIVE_SIZE = 256  # pixels: 1024 image tokens of 8 × 8 pixels
SECOND_SIZE = 512  # pixels: 4096 image tokens
PATCH = 2
TEXT_TOKENS = 512  # the pipeline's default
TEXT_WIDTH = 64
POOLED_WIDTH = 64
HEADS = 5
AXES = (4, 10, 10)  # channels of a head by axis of the positions; the width is 120
SMALLEST = 0.85  # side of a crop, as a share of the image's shorter side
SECOND_SHARE = 0.3  # of the steps in which smaller images stand for those of the second size
CROPS = {64: 64, 128: 32, 256: 16}  # different crops of each photograph at each size
# Nearly all is learnt on few image tokens, which stand for those of the larger sizes.
PHASES = (
    Phase(sizes=(64,), batch=16, steps=2200, rate=2e-3, final_rate=1e-3),
    Phase(sizes=(128,), batch=8, steps=350, rate=1e-3, final_rate=3e-4),
    Phase(sizes=(256, 128), batch=2, steps=120, rate=3e-4, final_rate=3e-5),
)
EMA_DECAY = 0.995
SAVE_EVERY = 100


def caption(name: str) -> str:
    """Return the prompt of a photograph.

    >>> caption("cat")
    'a photograph of a cat'
    """
    return f"a photograph of {PHOTOGRAPHS[name]}"


def photograph(name: str) -> Image.Image:
    """Return one of the photographs, in colour."""
    found = getattr(data, name)()
    pixels = np.asarray(found[0] if isinstance(found, tuple) else found)
    return Image.fromarray(pixels).convert("RGB")


def crop(picture: Image.Image, size: int, rng: np.random.Generator) -> np.ndarray:
    """Cut a random square of an image and scale it: uint8 [size, size, 3]."""
    side = round(min(picture.size) * rng.uniform(SMALLEST, 1))
    # Wide images have their subject near the middle. So the square is near it horizontally, and anywhere
    # vertically.
    left = round((picture.width - side) * rng.uniform(0.35, 0.65))
    top = round((picture.height - side) * rng.uniform(0, 1))
    box = (left, top, left + side, top + side)
    return np.asarray(picture.resize((size, size), Image.Resampling.LANCZOS, box=box))


class Latents:
    """Latents of crops of every photograph at one size."""

    @torch.no_grad()
    def __init__(self, codec: AutoencoderTiny, size: int, seed: int) -> None:
        rng = np.random.default_rng((seed, size))
        self.names = list(PHOTOGRAPHS)
        of_names = []
        for name in self.names:
            crops = [to_tensor(crop(photograph(name), size, rng)[None]) for _ in range(CROPS[size])]
            of_names.append(torch.cat([codec.encode(one).latents for one in crops]))
        self.latents = torch.stack(of_names)

    def batch(self, size: int, rng: np.random.Generator) -> tuple[Tensor, list[str]]:
        """Draw `size` crops: latents [b, c, h, w] and their captions."""
        which = rng.choice(len(self.names), size, replace=size > len(self.names))
        crops = rng.integers(self.latents.shape[1], size=size)
        return self.latents[which, crops], [caption(self.names[i]) for i in which]


class PhotoFlux(nn.Module):
    """The parts that are trained, with their loss.

    A word of the prompt is one token of T5, whose encoder looks it up and does nothing else: its attention
    and its feed-forward layer add zero, and so does the padding, whose embedding is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        captions = [caption(name) for name in PHOTOGRAPHS]
        self.tokenizer = build_tokenizer(captions)
        self.text_encoder = CLIPTextModel(text_config(self.tokenizer, POOLED_WIDTH))
        words = sorted(set(" ".join(captions).split()))
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *(("▁" + word, -1.0) for word in words)]
        self.tokenizer_2 = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=TEXT_TOKENS)
        self.text_encoder_2 = T5EncoderModel(
            T5Config(vocab_size=len(pieces), d_model=TEXT_WIDTH, d_kv=1, d_ff=1, num_layers=1, num_heads=1)
        ).requires_grad_(False)
        for name, weight in self.text_encoder_2.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                nn.init.zeros_(weight)
        words_of = self.text_encoder_2.get_input_embeddings()
        words_of.requires_grad_(True)
        with torch.no_grad():
            words_of.weight[0] = 0
        words_of.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), 0))
        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=LATENT_CHANNELS * PATCH**2,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=sum(AXES),
            num_attention_heads=HEADS,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=POOLED_WIDTH,
            guidance_embeds=False,
            axes_dims_rope=AXES,
        )
        self.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        # Blocks that change nothing at first (arXiv 2212.09748, section 3.2) learn faster.
        for block in self.transformer.transformer_blocks:
            for norm in (block.norm1, block.norm1_context):
                nn.init.zeros_(norm.linear.weight)
                nn.init.zeros_(norm.linear.bias)
        for block in self.transformer.single_transformer_blocks:
            nn.init.zeros_(block.norm.linear.weight)
            nn.init.zeros_(block.norm.linear.bias)
        nn.init.zeros_(self.transformer.proj_out.weight)

    def loss(self, latents: Tensor, captions: list[str]) -> Tensor:
        """Return the mean squared error of the predicted velocity, for latents [b, c, h, w]."""
        b, c, h, w = latents.shape
        latents = FluxPipeline._pack_latents(latents, b, c, h, w)
        side = h // PATCH
        is_second = side * FACTOR * PATCH > NATIVE_SIZE or torch.rand(()).item() < SECOND_SHARE
        whole = (SECOND_SIZE if is_second else NATIVE_SIZE) // (FACTOR * PATCH)
        # Logit-normal draws, shifted as the pipeline shifts its steps for the size that is stood for.
        factor = math.exp(shift_of(whole**2))
        uniform = torch.randn(b).sigmoid()
        sigma = factor * uniform / (1 + (factor - 1) * uniform)
        share = sigma.view(-1, 1, 1)
        noise = torch.randn_like(latents)
        # Fewer image tokens get fewer text tokens, so that both keep their weight in the attention.
        text, pooled = self.encode(captions, TEXT_TOKENS * side**2 // whole**2)
        predicted = self.transformer(
            hidden_states=(1 - share) * latents + share * noise,
            timestep=sigma,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            txt_ids=torch.zeros(text.shape[1], 3),
            img_ids=positions(side, whole),
            return_dict=False,
        )[0]
        return F.mse_loss(predicted, noise - latents)

    def encode(self, captions: list[str], tokens: int) -> tuple[Tensor, Tensor]:
        """Encode captions as the pipeline does: [b, tokens, TEXT_WIDTH] and [b, POOLED_WIDTH]."""
        ids = self.tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
        words = self.tokenizer_2(captions, padding="max_length", max_length=tokens, return_tensors="pt")
        return self.text_encoder_2(words.input_ids)[0], self.text_encoder(ids).pooler_output

    def pipeline(self, codec: AutoencoderTiny) -> FluxPipeline:
        """Assemble the pipeline that users load."""
        return FluxPipeline(
            scheduler=self.scheduler,
            vae=codec,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            text_encoder_2=self.text_encoder_2,
            tokenizer_2=self.tokenizer_2,
            transformer=self.transformer,
        )


def shift_of(tokens: int) -> float:
    """Return the logarithm of the noise shift at a number of image tokens, as FluxPipeline has it.

    >>> round(shift_of(256), 3), round(shift_of(4096), 3)
    (0.5, 1.15)
    """
    few, many = 256, 4096
    least, most = 0.5, 1.15
    return least + (most - least) * (tokens - few) / (many - few)


def positions(side: int, whole: int) -> Tensor:
    """Return the positions [side², 3] of side × side tokens that stand for whole × whole tokens."""
    step = whole // side
    places = torch.arange(side) * step + (step - 1) / 2
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3)


def load_codec() -> AutoencoderTiny:
    """Return the codec of the bundled models, frozen."""
    folder = tokenmerge_tools.demo.path("emoji-unet") / "vae"
    return AutoencoderTiny.from_pretrained(folder).eval().requires_grad_(False)


def train(options: argparse.Namespace) -> None:
    """Train the transformer and its text encoders together."""
    file = options.run / "denoiser.pt"
    torch.manual_seed(0)
    model = PhotoFlux()
    average = copy.deepcopy(model).requires_grad_(False)
    optimisers = build_optimisers(model)
    losses: list[float] = []
    if state := checkpoint.load(file, torch.device("cpu")):
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        losses = state["losses"]
    start = len(losses)
    end = total_steps(PHASES)
    rng = np.random.default_rng((0, start))
    torch.manual_seed(start)
    codec = load_codec()
    latents: dict[int, Latents] = {}
    clock = time.perf_counter()
    for step in range(start, end):
        phase, rate = at_step(PHASES, step)
        size = phase.sizes[step % len(phase.sizes)]
        if size not in latents:
            latents[size] = Latents(codec, size, seed=0)
        loss = model.loss(*latents[size].batch(phase.batch, rng))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        decay = min(EMA_DECAY, (1 + step) / (20 + step))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
        losses.append(loss.item())
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == end:
            seconds = (time.perf_counter() - clock) / min(SAVE_EVERY, len(losses) - start)
            clock = time.perf_counter()
            recent = np.mean(losses[-SAVE_EVERY:])
            print(f"step {step + 1}: {size} px, loss {recent:.4f}, {seconds:.2f} s a step", flush=True)
            states = {"model": model.state_dict(), "average": average.state_dict(), "losses": losses}
            checkpoint.save({**states, "optimisers": [o.state_dict() for o in optimisers]}, file)


def export(options: argparse.Namespace) -> None:
    """Write the folder that `FluxPipeline.from_pretrained` loads, in half precision."""
    state = checkpoint.load(options.run / "denoiser.pt", torch.device("cpu"))
    if state is None:
        raise FileNotFoundError(f"no denoiser in {options.run}: run the command `train` first")
    model = PhotoFlux()
    model.load_state_dict(state["average"])
    pipe = model.eval().pipeline(load_codec()).to(torch.float16)
    pipe.save_pretrained(options.folder)
    for encoder in options.folder.glob("text_encoder*"):
        edit_config(encoder / "config.json", dtype="float32")
    edit_config(options.folder / "vae" / "config.json", block_out_channels=None, _name_or_path=None)
    for part, tokenizer in pipe.components.items():
        if isinstance(tokenizer, CLIPTokenizer):
            tokenizer.backend_tokenizer.model.save(str(options.folder / part))
    size = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file())
    print(f"{options.folder}: {size / 1e6:.2f} MB after {len(state['losses'])} steps")


def sheet(options: argparse.Namespace) -> None:
    """Draw every prompt twice, above each other, for a look."""
    pipe = FluxPipeline.from_pretrained(options.folder)
    pipe.set_progress_bar_config(disable=True)
    names = options.names or list(PHOTOGRAPHS)
    columns = [np.concatenate(draw(pipe, [caption(name)] * 2, options.size)) for name in names]
    rows = [np.concatenate(columns[i : i + 5], axis=1) for i in range(0, len(columns), 5)]
    widest = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 0), (0, widest - row.shape[1]), (0, 0))) for row in rows]
    Image.fromarray((np.concatenate(padded) * 255).round().astype(np.uint8)).save(options.out)


def draw(pipe: FluxPipeline, prompts: Sequence[str], size: int) -> np.ndarray:
    """Draw one image a prompt, in 20 steps: [b, size, size, 3] in [0, 1]."""
    seeds = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    return pipe(
        list(prompts),
        height=size,
        width=size,
        num_inference_steps=20,
        generator=seeds,
        output_type="np",
    ).images


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/photo-flux"), help="folder of the checkpoints")
    commands = parser.add_subparsers(required=True)
    commands.add_parser("train").set_defaults(do=train)
    exported = commands.add_parser("export")
    exported.add_argument("folder", type=Path)
    exported.set_defaults(do=export)
    seen = commands.add_parser("sheet")
    seen.add_argument("folder", type=Path)
    seen.add_argument("--out", type=Path, required=True)
    seen.add_argument("--size", type=int, default=NATIVE_SIZE)
    seen.add_argument("--names", nargs="*", choices=list(PHOTOGRAPHS))
    seen.set_defaults(do=sheet)
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    options.do(options)


if __name__ == "__main__":
    sys.exit(main())
