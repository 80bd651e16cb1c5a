"""Train a bundled model; started again, go on from the last checkpoint.

python -m tools.training.train emoji-unet
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import torch
import typer
from PIL import Image
from rich.progress import Progress, TextColumn
from tools.training import checkpoint, parallel
from tools.training.codec import load_codec
from tools.training.data import Latents
from tools.training.mmdit import EmojiMMDiT
from tools.training.muon import build_optimisers
from tools.training.schedule import at_step, stretch, total_steps
from tools.training.unet import EmojiUNet

from tokenmerge import ToMeConfig, apply_token_merging, remove_token_merging
from tokenmerge_tools.demo.glyphs import BACKGROUNDS, caption, read_glyphs

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RUNS = Path("runs")
Model = EmojiUNet | EmojiMMDiT
MODELS: dict[str, type[Model]] = {model.name: model for model in (EmojiUNet, EmojiMMDiT)}
SAVE_EVERY = 100
EMA_DECAY = 0.998
GUIDANCE = 3.0
INFERENCE_STEPS = 20
SAMPLE_PROMPTS = [
    "a red apple on a light blue background",
    "a grinning face on a white background",
    "a cat face on a pink background",
    "a rocket on a dark blue background",
    "a hamburger on a light green background",
    "a car on a yellow background",
    "a palm tree on an orange background",
    "a violin on a black background",
]


def build(name: str, seed: int) -> Model:
    """Build a model with seeded random weights."""
    if name not in MODELS:
        raise typer.BadParameter(f"{name!r} is none of the models: {', '.join(MODELS)}")
    torch.manual_seed(seed)
    glyphs = read_glyphs()
    return MODELS[name]([caption(glyph.name, background) for glyph in glyphs for background in BACKGROUNDS])


def load_trained(name: str, device: torch.device, average: bool) -> Model:
    """Return the model of the last checkpoint, with its averaged weights or the last ones."""
    state = checkpoint.load(RUNS / name / "last.pt", device)
    if state is None:
        raise FileNotFoundError(
            f"no checkpoint in {RUNS / name}: run `python -m tools.training.train {name}` first"
        )
    model = build(name, seed=0).to(device)
    model.load_state_dict(state["average" if average else "model"])
    return model.eval()


@torch.no_grad()
def update_average(average: torch.nn.Module, model: torch.nn.Module, step: int) -> None:
    """Move the exponential moving average towards the model.

    It reaches back a fiftieth of the run so far, at most: a longer one lags while the model improves quickly.
    """
    decay = min(EMA_DECAY, (1 + step) / (50 + step))
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, 1 - decay)


def set_merging(model: Model, merging: ToMeConfig | None) -> None:
    """Let tokens merge in the model that is trained, or end it; the averaged one stays dense."""
    if merging is None:
        remove_token_merging(model.denoiser)
    else:
        apply_token_merging(model.denoiser, merging)


def plot_losses(losses: list[float], path: Path) -> None:
    """Plot every step's loss and its running mean."""
    window = min(100, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(losses, linewidth=0.3, alpha=0.4)
    axes.plot(np.arange(window - 1, len(losses)), smooth)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def save_samples(model: Model, codec: torch.nn.Module, size: int, path: Path) -> None:
    """Generate the sample prompts side by side."""
    pipe = model.pipeline(codec)
    pipe.set_progress_bar_config(disable=True)
    pictures = pipe(
        SAMPLE_PROMPTS,
        height=size,
        width=size,
        num_inference_steps=INFERENCE_STEPS,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    Image.fromarray((np.concatenate(pictures, axis=1) * 255).round().astype(np.uint8)).save(path)


def main(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(MODELS)}.")],
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, …")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Arithmetic of the forward pass: float32 or bfloat16.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of weights, data and noise.")] = 0,
    length: Annotated[float, typer.Option(help="Factor on the steps of every phase.")] = 1.0,
    start_from: Annotated[
        Path | None, typer.Option(help="Exported model to go on from, where there is no checkpoint.")
    ] = None,
    first_phase: Annotated[
        int, typer.Option(help="Phase to begin with, from 0: what --start-from has learnt is left out.")
    ] = 0,
    samples_every: Annotated[int, typer.Option(help="Steps between sample images.")] = 500,
) -> None:
    """Train a bundled model; started again, go on from the last checkpoint."""
    rank, world = parallel.start()
    run = RUNS / name
    target = torch.device(device)
    model = build(name, seed).to(target)
    average = copy.deepcopy(model).requires_grad_(False)
    optimisers = build_optimisers(model)
    losses: list[float] = []
    if state := checkpoint.load(run / "last.pt", target):
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        losses = state["losses"]
    elif start_from is not None:
        model.load_exported(start_from)
        average.load_exported(start_from)
    phases = stretch(model.phases[first_phase:], length)
    start, end = len(losses), total_steps(phases)
    # Each process draws its own images and noise; a resumed run draws others than those before it.
    rng = np.random.default_rng((seed, start, rank))
    torch.manual_seed(int(rng.integers(2**63)))
    codec = load_codec(target)
    data: dict[int, Latents] = {}
    merging: ToMeConfig | None = None

    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, disable=rank > 0) as progress:
        bar = progress.add_task(name, total=end, completed=start, note="")
        clock = time.perf_counter()
        for step in range(start, end):
            phase, rate = at_step(phases, step)
            size = phase.sizes[step % len(phase.sizes)]
            if size not in data:
                data = {kept: data[kept] for kept in data if kept in phase.sizes}
                data[size] = Latents(read_glyphs(), codec, size)
            if phase.merging != merging:
                merging = phase.merging
                set_merging(model, merging)
            latents, captions = data[size].batch(phase.batch // world, rng)
            autocast = torch.autocast(target.type, getattr(torch, dtype), enabled=dtype != "float32")
            with autocast:
                loss = model.loss(latents.to(target), captions)
            model.zero_grad()
            loss.backward()
            parallel.average_gradients(model, world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = rate
                with autocast:  # for the products of Muon
                    optimiser.step()
            update_average(average, model, step)
            losses.append(loss.item())
            if rank > 0:
                continue

            recent = float(np.mean(losses[-SAVE_EVERY:]))
            sizes = ", ".join(map(str, phase.sizes))
            progress.update(bar, advance=1, note=f"{sizes} px, loss {recent:.4f}")
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == end:
                state: dict[str, Any] = {
                    "model": model.state_dict(),
                    "average": average.state_dict(),
                    "optimisers": [optimiser.state_dict() for optimiser in optimisers],
                    "losses": losses,
                }
                checkpoint.save(state, run / "last.pt")
                plot_losses(losses, run / "loss.png")
                speed = SAVE_EVERY * phase.batch / (time.perf_counter() - clock)
                clock = time.perf_counter()
                progress.console.log(
                    f"step {step + 1}: {sizes} px, loss {recent:.4f}, {speed:.1f} pictures/s"
                )
            if (step + 1) % samples_every == 0 or step + 1 == end:
                largest = max(*phase.sizes, model.native_size)
                save_samples(average, codec, largest, run / f"samples-{step + 1:06d}.png")


if __name__ == "__main__":
    typer.run(main)
