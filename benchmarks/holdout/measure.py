"""Measure the default method and diffusers' caches on the hold-out.

A line of the record is one image: its method, the operations of the denoiser, counted while it ran, and the
PSNR to the dense image of the same seed. A second run with the same record continues where the first one
stopped. `table` prints the tables of docs/holdout.md.

    python -m benchmarks.holdout.measure run --out benchmarks/holdout_cpu.jsonl
    python -m benchmarks.holdout.measure table --out benchmarks/holdout_cpu.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from benchmarks.holdout.train import NATIVE_SIZE, caption
from diffusers import FirstBlockCacheConfig, FluxPipeline, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks.sea_cache import SeaCacheConfig
from PIL import Image

import tokenmerge
from tokenmerge import StepReuse, ToMeConfig
from tokenmerge_tools.pipelines.counting import counting

MODEL = Path(__file__).parent / "photo-flux"
STEPS = 20
NAMES = ("cat", "coffee", "rocket", "gravel")
CALIBRATION = "astronaut"  # the image that MagCache learns its ratios on
FEWER = (15, 13, 10, 8, 7, 6)  # dense steps: 1.33×, 1.54×, 2×, 2.5×, 2.86× and 3.33×
SPEEDS = (1.3, 1.5, 2.0, 2.5, 3.0)
# Settings of diffusers' caches: the documented default, and weaker and stronger ones.
THRESHOLDS = {
    "first block": (0.05, 0.1, 0.2),
    "SeaCache": (0.1, 0.25, 0.5),
    "MagCache": (0.03, 0.06, 0.12),
}
INTERVALS = (2, 3, 5)
LEAST_ERROR = 1e-10  # keeps the PSNR of equal images finite
EVERY = (1.3, 1.6, 2.25)  # of this package's step reuse, without merging
DENSE = "dense"


def methods() -> Iterator[tuple[str, float]]:
    """List the methods with their setting, dense first."""
    yield from ((DENSE, float(steps)) for steps in (STEPS, *FEWER))
    yield from (("tokenmerge", speed) for speed in SPEEDS)
    yield from (("step reuse", every) for every in EVERY)
    yield from (("first block", threshold) for threshold in THRESHOLDS["first block"])
    yield from (("TaylorSeer", float(every)) for every in INTERVALS)
    yield from (("TaylorSeer lite", float(every)) for every in INTERVALS)
    yield from (("SeaCache", threshold) for threshold in THRESHOLDS["SeaCache"])
    yield from (("MagCache", threshold) for threshold in THRESHOLDS["MagCache"])


@contextlib.contextmanager
def applied(pipe: FluxPipeline, method: str, setting: float, ratios: list[float]) -> Iterator[None]:
    """Apply a method to the pipeline."""
    if method == DENSE:
        yield
    elif method == "tokenmerge":
        with tokenmerge.token_merging(pipe, speedup=setting):
            yield
    elif method == "step reuse":
        with tokenmerge.token_merging(pipe, ToMeConfig(ratio=0.0, reuse=StepReuse(every=setting))):
            yield
    else:
        with contextlib.ExitStack() as in_force:
            if method == "SeaCache":
                in_force.enter_context(telling_the_step(pipe))
            pipe.transformer.enable_cache(cache_config(method, setting, ratios))
            in_force.callback(pipe.transformer.disable_cache)
            yield


def cache_config(method: str, setting: float, ratios: list[float]) -> Any:
    """Return the configuration of one of diffusers' caches."""
    match method:
        case "first block":
            return FirstBlockCacheConfig(threshold=setting)
        case "TaylorSeer" | "TaylorSeer lite":
            return TaylorSeerCacheConfig(
                cache_interval=int(setting),
                taylor_factors_dtype=torch.float32,
                use_lite_mode=method == "TaylorSeer lite",
            )
        case "SeaCache":
            return SeaCacheConfig(threshold=setting, raw_vision_callback=latents_of)
        case "MagCache":
            return MagCacheConfig(threshold=setting, num_inference_steps=STEPS, mag_ratios=ratios)
    raise ValueError(f"method {method!r} is none of those of `methods`")


def latents_of(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the latents [c, 1, h, w] of each image of a call of FLUX's transformer, for SeaCache."""
    packed = kwargs["hidden_states"]
    side = math.isqrt(packed.shape[1])
    grids = packed.unflatten(2, (-1, 2, 2)).unflatten(1, (side, side)).permute(0, 3, 1, 4, 2, 5)
    return [grid.reshape(grid.shape[0], 1, 2 * side, 2 * side) for grid in grids]


@contextlib.contextmanager
def telling_the_step(pipe: FluxPipeline) -> Iterator[None]:
    """Add to the pipeline's cache context what SeaCache needs and FluxPipeline does not say."""
    original = pipe.transformer.cache_context

    @functools.wraps(original)
    def cache_context(name: str) -> Any:
        scheduler = pipe.scheduler
        step = scheduler.step_index or 0
        return original(
            name, step_index=step, sigma=scheduler.sigmas[step], num_inference_steps=len(scheduler.timesteps)
        )

    pipe.transformer.cache_context = cache_context
    try:
        yield
    finally:
        del pipe.transformer.cache_context


def calibrate(pipe: FluxPipeline, size: int) -> list[float]:
    """Return MagCache's ratios, one a step, learnt on an image that is not measured."""
    pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=STEPS))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        draw(pipe, CALIBRATION, size, STEPS)
    pipe.transformer.disable_cache()
    *_, line = (line for line in printed.getvalue().splitlines() if line.startswith("["))  # after a heading
    found: list[float] = json.loads(line)
    return found


def draw(pipe: FluxPipeline, name: str, size: int, steps: int) -> np.ndarray:
    """Draw an image: [size, size, 3] in [0, 1]."""
    return pipe(
        caption(name),
        height=size,
        width=size,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images[0]


def run(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    pipe = FluxPipeline.from_pretrained(options.model)
    pipe.set_progress_bar_config(disable=True)
    for size in options.size:
        ratios = None
        for name in NAMES:
            done = {key(line) for line in read(options.out)}
            missing = [one for one in methods() if (size, name, *one) not in done]
            if not missing:
                continue
            dense = draw(pipe, name, size, STEPS)
            if options.pictures:
                file = options.pictures / f"{name}-{size}.png"
                Image.fromarray((dense * 255).round().astype(np.uint8)).save(file)
            if ratios is None:
                ratios = calibrate(pipe, size)
            for method, setting in missing:
                steps = int(setting) if method == DENSE else STEPS
                with applied(pipe, method, setting, ratios), counting(pipe.transformer) as counted:
                    picture = draw(pipe, name, size, steps)
                error = float(((picture - dense) ** 2).mean())
                line = {
                    "size": size,
                    "picture": name,
                    "method": method,
                    "setting": setting,
                    "flops": counted.flops,
                    "psnr": round(-10 * math.log10(max(error, LEAST_ERROR)), 3),
                }
                print(line, flush=True)
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each variant from 1.3× to 3×: speed by operations, closeness, and lead over ours."""
    dense = {line["picture"]: line["flops"] for line in lines if label(line) == DENSE}
    cells: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        cells[label(line)].append((dense[line["picture"]] / line["flops"], line["psnr"]))
    points = {name: tuple(map(statistics.mean, zip(*found, strict=True))) for name, found in cells.items()}
    own = sorted(point for name, point in points.items() if name.startswith("**"))
    yield "| variant | by operations | PSNR to dense | against the default method |"
    yield "|---|---:|---:|---:|"
    for name, (speed, closeness) in sorted(points.items(), key=lambda point: (point[0][0] != "*", point[1])):
        if SPEEDS[0] <= round(speed, 1) <= SPEEDS[-1]:
            error = statistics.stdev(psnr for _, psnr in cells[name]) / len(cells[name]) ** 0.5
            ours = float(np.interp(speed, *zip(*own, strict=True)))
            lead = "" if name.startswith("**") else f"{closeness - ours:+.1f} dB".replace("-", "−")
            yield f"| {name} | {speed:.2f}× | {closeness:.1f} ± {error:.1f} dB | {lead} |"


def label(line: dict[str, Any]) -> str:
    """Return the name of a variant in the table."""
    method = line["method"]
    setting = f"{line['setting']:g}"
    if method == DENSE:
        return DENSE if line["setting"] == STEPS else f"fewer steps, {setting}"
    return f"**auto speedup={setting}**" if method == "tokenmerge" else f"{method} {setting}"


def key(line: dict[str, Any]) -> tuple[int, str, str, float]:
    return line["size"], line["picture"], line["method"], line["setting"]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--model", type=Path, default=MODEL, help="folder that train.py wrote")
    parser.add_argument(
        "--size", type=int, nargs="+", default=[NATIVE_SIZE, 512], help="pixels (default: 256 512)"
    )
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--pictures", type=Path, help="existing folder for the dense images, for a look")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if options.what == "run":
        run(options)
    else:
        lines = read(options.out)
        for size in options.size:
            print("\n".join(table([line for line in lines if line["size"] == size])), end="\n\n")


if __name__ == "__main__":
    sys.exit(main())
