"""Time a UNet of ppdiffusers dense, with ppdiffusers' own ToMe and with tokenmerge, in turns.

The grid is that of ppdiffusers' own table on ToMe: ratios × batch sizes × attention. A line of the record is
one batch size and attention: seconds of each call, by variant, and those of all its threads on the CPU, which
depend less on what else runs on the machine. In each round every variant is called once, in an order that
changes, so that a change of the machine's speed meets all of them.

What fits a CPU::

    python benchmarks/paddle/grid.py --batches 1 --rounds 4 --out benchmarks/paddle/grid_cpu.jsonl
    python benchmarks/paddle/grid.py --batches 2 --size 48 --rounds 3 --out benchmarks/paddle/grid_cpu.jsonl

The whole table, on a GPU::

    python benchmarks/paddle/grid.py --device gpu --dtype float16 --batches 2 20 32 64 128 --rounds 20 \
        --attention plain memory-efficient --out benchmarks/paddle/grid_gpu.jsonl

A batch of 2 is one image with classifier-free guidance.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import ppdiffusers
from ppdiffusers import UNet2DConditionModel

from tokenmerge.paddle import apply_patch, remove_patch

# Taken before anything can replace them.
OWN_APPLY = paddle.nn.Layer.apply_tome
OWN_REMOVE = paddle.nn.Layer.remove_tome
SD15 = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}
TEXT_TOKENS = 77


def own(ratio: float) -> tuple[Callable, Callable]:
    """Return the ``apply_tome`` of ppdiffusers and its removal."""
    return lambda unet: OWN_APPLY(unet, ratio=ratio), OWN_REMOVE


def ours(ratio: float) -> tuple[Callable, Callable]:
    """Return tokenmerge's ``apply_patch`` and its removal."""
    return lambda unet: apply_patch(unet, ratio=ratio), remove_patch


def variants(ratios: list[float]) -> dict[str, tuple[Callable, Callable]]:
    """Return by name how a UNet is patched, and how it is restored."""
    found: dict[str, tuple[Callable, Callable]] = {"dense": (lambda unet: unet, lambda unet: unet)}
    for ratio in ratios:
        found[f"ppdiffusers {ratio:g}"] = own(ratio)
        found[f"tokenmerge {ratio:g}"] = ours(ratio)
    return found


def seconds(unet: Any, arguments: tuple, gpu: bool) -> tuple[float, float]:
    """Return the time of one call, and that of all threads on the CPU."""
    start = time.perf_counter()
    cpu_start = time.process_time()
    with paddle.no_grad():
        unet(*arguments)
    if gpu:
        paddle.device.cuda.synchronize()
    return round(time.perf_counter() - start, 4), round(time.process_time() - cpu_start, 4)


def measure(unet: Any, batch: int, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the seconds and CPU seconds of each variant by round. A call before them is not counted."""
    sample = paddle.randn([batch, 4, options.size, options.size]).cast(options.dtype)
    text = paddle.randn([batch, TEXT_TOKENS, SD15["cross_attention_dim"]]).cast(options.dtype)
    patched = variants(options.ratios)
    wall: dict[str, list[float]] = {name: [] for name in patched}
    cpu: dict[str, list[float]] = {name: [] for name in patched}
    order = random.Random(0)
    gpu = options.device == "gpu"
    seconds(unet, (sample, 1000, text), gpu)
    for turn in range(options.rounds):
        for name in order.sample(list(patched), len(patched)):
            apply, remove = patched[name]
            apply(unet)
            taken, worked = seconds(unet, (sample, 990 - 10 * turn, text), gpu)
            remove(unet)
            wall[name].append(taken)
            cpu[name].append(worked)
    return {"seconds": wall, "cpu_seconds": cpu}


def summary(times: dict[str, list[float]]) -> list[str]:
    """Print a line for each variant: median and quartiles of its seconds, beside the others."""
    lines = []
    for name, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else taken * 3
        faster = statistics.median(d / t for d, t in zip(times["dense"], taken, strict=True))
        line = f"{name:20} {middle:7.2f} s ({low:.2f} to {high:.2f}), {faster:.2f}x dense"
        if name.startswith("tokenmerge"):
            rival = times[name.replace("tokenmerge", "ppdiffusers")]
            ratio = statistics.median(r / t for r, t in zip(rival, taken, strict=True))
            line += f", {ratio:.2f}x ppdiffusers' own"
        lines.append(line)
    return lines


def main() -> None:
    """Measure what the arguments ask for and append it to the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.749])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--attention", nargs="+", choices=("plain", "memory-efficient"), default=["plain"])
    parser.add_argument("--size", type=int, default=64, help="of the latents: 64 for an image of 512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="record to append to, one JSON object a line")
    options = parser.parse_args()

    paddle.set_device(options.device)
    paddle.seed(0)
    unet = UNet2DConditionModel(**SD15)
    unet.eval()
    unet.to(dtype=options.dtype)
    for attention in options.attention:
        if attention == "memory-efficient":
            unet.enable_xformers_memory_efficient_attention()
        for batch in options.batches:
            times = measure(unet, batch, options)
            record = {
                "model": "UNet of Stable Diffusion 1.5, random weights",
                "latents": [options.size, options.size],
                "batch": batch,
                "attention": attention,
                "device": options.device,
                "dtype": options.dtype,
                "machine": platform.machine(),
                "paddle": paddle.__version__,
                "ppdiffusers": ppdiffusers.__version__,
                **times,
            }
            with options.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
            for unit, taken in times.items():
                print(
                    f"batch {batch}, {attention} attention, {unit}", *summary(taken), sep="\n  ", flush=True
                )


if __name__ == "__main__":
    main()
