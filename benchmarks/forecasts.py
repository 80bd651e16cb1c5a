"""Forecasts of other methods in place of ours: what takes the place of the model's output in skipped steps.

Each image has the same number of full steps. In the others a forecast replaces the output of the whole
denoiser. A line of the record is one image: its forecast, where its full steps lie, and its PSNR to the
dense image of the same seed. Costs are not compared: the forecast of DiCache also runs the first block. A
second run with the same record continues where the first one stopped. `--table` prints the record.

    python benchmarks/forecasts.py --out benchmarks/forecasts_cpu.jsonl
    python benchmarks/forecasts.py --table --out benchmarks/forecasts_cpu.jsonl

The forecasts, from the last outputs v₁, v₂ and v₃, the last one first, k steps after the last one:

- `repeat`: v₁, as EasyCache and the first-block cache.
- `linear`: on the straight line through v₁ and v₂ (TaylorSeer, arXiv 2503.06923, order 1).
- `ours`: the same, damped by how far the change kept its direction.
- `quadratic`: on the parabola through the last three (TaylorSeer, order 2).
- `foca`: v₁ + k/2 (D₁ + D₀), where D₁ is the change a step between the last two full steps, and D₀ that
  between the last two steps, forecast or not (arXiv 2508.16211).
- `dicache`: v₂ + γ (v₁ - v₂), where γ, from 1 to 1.5, is how far the first block's residual went on
  (arXiv 2508.17356). For transformers.

The full steps lie `even`, as in the default method without its exceptions, or by `seacache`: at equal
distances of the summed change of the noise-filtered latents (arXiv 2602.18993), which a dense run shows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks.sea_cache import _apply_sea_filter
from policy import prompts_of
from torch import Tensor

from tokenmerge import StepReuse
from tokenmerge.plans.choose import distance
from tokenmerge_tools.demo import path

SCENES = (("emoji-unet", 3.0), ("emoji-unet", 7.5), ("emoji-mmdit", 3.0), ("emoji-mmdit", 7.0))
PROMPTS = 48
SEED = 8600
STEPS = 20
SIZE = 128
COUNTS = (12, 8)  # full steps
FORECASTS = ("ours", "repeat", "linear", "quadratic", "foca", "dicache")
PLACES = ("even", "seacache")
MOST_GAMMA = 1.5  # in the forecast of DiCache
LEAST_ERROR = 1e-10  # keeps the PSNR of equal images finite
POWER = 2.0  # of the spectrum of images, in SeaCache's filter
KEY = ("model", "guidance", "prompt", "complete", "places", "forecast")


class Denoiser:
    """The denoiser of a pipeline, whose output is forecast in some steps."""

    def __init__(self, pipe: DiffusionPipeline, full: Sequence[int], forecast: str) -> None:
        self.pipe = pipe
        self.full = full
        self.name = forecast
        self.model = getattr(pipe, "transformer", None) or pipe.unet
        self.original = self.model.forward
        # The last three full steps: index, output, residual of the first block.
        self.known: list[tuple[int, Tensor, Any]] = []
        self.latest: list[Tensor] = []  # outputs of the last two steps, full or not
        self.latents: list[tuple[float, Tensor]] = []  # of each step: its noise level, and the sample
        self.residual: Any = None  # of the first block, where it is needed
        self.step = 0

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Put the forecasts into the pipeline."""
        hook = contextlib.nullcontext()
        if self.name == "dicache":
            block = self.model.transformer_blocks[0]
            hook = block.register_forward_hook(self._probe, with_kwargs=True)
        with hook, mock.patch.object(self.model, "forward", self._forward):
            yield

    def _probe(self, block: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.residual = result[1] - kwargs["hidden_states"]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        sample = args[0] if args else kwargs["hidden_states"]
        self.latents.append((noise_share(self.pipe.scheduler, self.step), sample[-1:]))
        # DiCache needs the first block in each step.
        if self.step in self.full or self.name == "dicache":
            result = self.original(*args, **kwargs)[0]
        if self.step in self.full:
            self.known.append((self.step, result, self.residual))
            del self.known[:-3]
        else:
            result = self._forecast()
        self.latest.append(result)
        del self.latest[:-2]
        self.step += 1
        return (result,)

    def _forecast(self) -> Tensor:
        (index, v1, r1), *older = reversed(self.known)
        after = self.step - index
        if not older or self.name == "repeat":
            return v1
        before, v2, r2 = older[0]
        change = (v1 - v2) / (index - before)  # in a step
        if self.name == "foca":
            return v1 + after / 2 * (change + self.latest[-1] - self.latest[-2])
        if self.name == "dicache":
            gone = (self.residual - r2).abs().mean() / (r1 - r2).abs().mean()
            return v2 + gone.clamp(1.0, MOST_GAMMA) * (v1 - v2)
        if self.name == "quadratic" and len(older) > 1:
            first, v3, _ = older[1]
            bend = (change - (v2 - v3) / (before - first)) / (index - first)
            return v1 + after * change + after * (after + index - before) * bend
        if self.name == "ours":
            then = v2 - older[1][1] if len(older) > 1 else torch.zeros_like(v1)
            kept = torch.cosine_similarity((v1 - v2).flatten(1), then.flatten(1)).clamp(min=0)
            return v1 + after * change * kept.view(-1, 1, 1, 1)
        return v1 + after * change


def noise_share(scheduler: Any, step: int) -> float:
    """Return the share of noise in the sample of a step, from 0 to 1."""
    if "Flow" in type(scheduler).__name__:
        return float(scheduler.sigmas[step])
    kept = float(scheduler.alphas_cumprod[int(scheduler.timesteps[step])])
    sigma = (1 - kept) ** 0.5
    return sigma / (sigma + kept**0.5)


def complete_steps(places: str, count: int, latents: Sequence[tuple[float, Tensor]]) -> tuple[int, ...]:
    """Return ``count`` full steps, from the samples of a dense run."""
    if places == "even":
        return StepReuse(every=distance(STEPS, count)).steps_of(STEPS).full
    filtered = []
    for sigma, sample in latents:
        picture = sample[0].unsqueeze(1).movedim(0, -1)
        filtered.append(_apply_sea_filter(picture, sigma=sigma, power_exp=POWER))
    changes = []
    for then, now in itertools.pairwise(filtered):
        changes.append(float((now - then).abs().mean() / then.abs().mean()))
    inner = range(2, STEPS - 1)
    low, high = 0.0, sum(changes)
    # Find the threshold that leaves this many.
    for _ in range(50):
        threshold = (low + high) / 2
        found = [0, 1]
        summed = 0.0
        for step in inner:
            summed += changes[step - 1]
            if summed >= threshold:
                found = [*found, step]
                summed = 0.0
        found.append(STEPS - 1)
        if len(found) > count:
            low = threshold
        else:
            high = threshold
        if len(found) == count:
            break
    return tuple(found)


def draw(denoiser: Denoiser, prompt: str, guidance: float, seed: int) -> np.ndarray:
    with denoiser.replaced():
        return denoiser.pipe(
            prompt,
            height=SIZE,
            width=SIZE,
            num_inference_steps=STEPS,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images[0]


def measure(out: Path, prompts: int) -> None:
    """Draw the images that are not in the record."""
    found = {key(line) for line in read(out)}
    diffusers.utils.logging.set_verbosity_error()
    for model, guidance in SCENES:
        pipe = DiffusionPipeline.from_pretrained(path(model))
        pipe.set_progress_bar_config(disable=True)
        for number, prompt in enumerate(prompts_of(PROMPTS, prompts)):
            shown = Denoiser(pipe, range(STEPS), "repeat")
            dense = draw(shown, prompt, guidance, SEED + number)
            for count, places, forecast in itertools.product(COUNTS, PLACES, FORECASTS):
                steps = complete_steps(places, count, shown.latents)
                about = (model, guidance, prompt, count, places, forecast)
                line: dict[str, Any] = {**dict(zip(KEY, about, strict=True)), "steps": steps}
                if key(line) in found or (forecast == "dicache" and model == "emoji-unet"):
                    continue
                if places != "even" and forecast not in ("ours", "linear"):
                    continue
                picture = draw(Denoiser(pipe, steps, forecast), prompt, guidance, SEED + number)
                error = float(((picture - dense) ** 2).mean())
                line["psnr"] = round(-10 * math.log10(max(error, LEAST_ERROR)), 3)
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, flush=True)


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each forecast: the PSNR of ours at even places, and how much closer the others are."""
    of_ours = [line for line in lines if (line["forecast"], line["places"]) == ("ours", "even")]
    own = {key(line)[:4]: line["psnr"] for line in of_ours}
    cells: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        row = line["forecast"], line["places"]
        beside = 0.0 if row == ("ours", "even") else own[key(line)[:4]]
        cells[row][line["model"], line["guidance"]].append(line["psnr"] - beside)
    columns = list(dict.fromkeys(itertools.chain.from_iterable(cells.values())))
    heads = [f"`{model}`, guidance {guidance:g}" for model, guidance in columns]
    yield f"| forecast | places | {' | '.join(heads)} |"
    yield "|---|---|" + "---:|" * len(columns)
    for (forecast, places), own_cells in cells.items():
        shown = []
        for column in columns:
            found = own_cells.get(column, [])
            sign = "" if (forecast, places) == ("ours", "even") else "+"
            error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.1f}" if len(found) > 1 else ""
            shown.append(f"{statistics.mean(found):{sign}.1f}{error}".replace("-", "−") if found else "")
        yield f"| {forecast} | {places} | {' | '.join(shown)} |"


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(read(options.out))))
    else:
        measure(options.out, options.prompts)


if __name__ == "__main__":
    main()
