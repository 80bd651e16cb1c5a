"""Peak memory of tensors during a generation, dense and with `auto`, and the cache size in the report.

The peak is counted from PyTorch's allocations, not from the process. It excludes tensors that existed before
the call, such as the weights. Latents are not decoded.

    python benchmarks/peak_memory.py --model emoji-unet emoji-mmdit --size 256 --ratio 0.25 0.5 0.6
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch.profiler import ProfilerActivity, profile

import tokenmerge
from tokenmerge import token_merging
from tokenmerge.default_method import settings_for
from tokenmerge.report import predict
from tokenmerge_tools.demo import path


def peak(pipe: DiffusionPipeline, size: int, options: argparse.Namespace) -> int:
    """Return the peak bytes of the tensors that are allocated during a generation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        pipe(
            "a red apple on a light blue background",
            height=size,
            width=size,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    events = profiled.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    alive = 0
    highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        highest = max(highest, alive)
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["emoji-unet", "emoji-mmdit"])
    parser.add_argument("--size", type=int, nargs="+", default=[256], help="pixels (default: 256)")
    parser.add_argument("--speedup", type=float, nargs="+", default=[0.25, 0.5, 0.6])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument(
        "--out", type=Path, help="append the figures to this file, one JSON line per model and size"
    )
    options = parser.parse_args()

    diffusers.utils.logging.set_verbosity_error()
    for name in options.model:
        pipe = DiffusionPipeline.from_pretrained(path(name))
        pipe.set_progress_bar_config(disable=True)
        for size in options.size:
            dense = peak(pipe, size, options)
            print(f"\n{name}, {size} × {size}, {options.steps} steps: dense {dense / 1e6:.1f} MB")
            print(f"{'speed':>5}{'peak':>10}{'more':>10}{'kept':>10}   MB")
            found: dict[str, Any] = {}
            for speedup in options.speedup:
                batch = 2 if options.guidance > 1 else 1
                side = size // pipe.vae_scale_factor
                config = settings_for(pipe, speedup, side, side, options.steps, options.guidance)
                with token_merging(pipe, config):
                    merged = peak(pipe, size, options)
                kept = predict(pipe, config, side, side, batch).kept_bytes
                found[f"{speedup:g}"] = {"peak": merged, "kept": kept}
                cells = [f"{value / 1e6:>10.1f}" for value in (merged, merged - dense, kept)]
                print(f"{speedup:>5g}{''.join(cells)}")
            if options.out:
                conditions = {key: getattr(options, key) for key in ("steps", "guidance")}
                about = {"model": name, "size": size, **conditions, "torch": torch.__version__}
                line = {**about, "tokenmerge": tokenmerge.__version__, "dense": dense, "auto": found}
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
