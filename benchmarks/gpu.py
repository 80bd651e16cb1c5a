"""Measure token merging and step reuse on one GPU: correctness, kernels, speed, pictures.

Each measurement is one line of JSON, and is on the disk before the next one begins, so a run that is cut off
keeps what it has measured. The parts run in the order of their value, each within a budget of seconds. A
measurement that fails is recorded with its error, and the run goes on. Nothing is downloaded: weights are
random, except those of the bundled models.

    python benchmarks/gpu.py --out gpu.jsonl                        # everything, below 9 minutes on an H100
    python benchmarks/gpu.py --parts env,attention --limit 120
    python benchmarks/gpu.py --device cpu --tiny --out tiny.jsonl   # the same code on small models
    python benchmarks/gpu.py --show gpu.jsonl                       # the speed-ups of a record, as a table
    python benchmarks/gpu.py --write                                # the tables of docs/gpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

BEGAN = time.monotonic()  # the imports below count too

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import tokenmerge  # noqa: E402
from tokenmerge import PlanSharing, ToMeConfig, token_merging  # noqa: E402
from tokenmerge.ops.sized_attention import attend_by_columns  # noqa: E402
from tokenmerge.planners import PLANNERS, calibration  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
# The records in the documentation, by card.
CARDS = {
    f"NVIDIA {card.upper()}": [Path(__file__).parent / f"gpu_{card}{run}.jsonl" for run in runs]
    for card, runs in {"h200": ("", "_b", "_c", "_d", "_e"), "h100": ("", "_b", "_c")}.items()
}
Facts = dict[str, Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
# After these errors the device answers no other call.
LOST = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SHARED = ToMeConfig(
    ratio=0.5, planner="tiled", plans=PlanSharing(blocks=True), proportional=True, max_downsample=2
)
# What makes a model small: the arguments of its class in diffusers that differ from those of its geometry.
_UNET = {"layers_per_block": 1, "cross_attention_dim": 16, "attention_head_dim": 2}
TINY: dict[str, Facts] = {
    "sd15": {
        **_UNET,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
    "sdxl": {
        **_UNET,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": 1,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
    },
    "sd3": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "caption_projection_dim": 32}
    | {"joint_attention_dim": 16, "pooled_projection_dim": 16},
    "flux": {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
    | {"joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)},
    "wan": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "ffn_dim": 32,
        "text_dim": 16,
    },
}
# The generations and variants in the documentation.
GENERATIONS = {
    "flux 1024": "FLUX.1, 1024 px, 28 steps",
    "sd3 1024": "SD3, 1024 px, 28 steps",
    "sdxl 1024": "SDXL, 1024 px, 30 steps",
    "sd15 1024": "SD 1.5, 1024 px, 20 steps",
    "sd15 768": "SD 1.5, 768 px, 20 steps",
    "sd15 512": "SD 1.5, 512 px, 20 steps",
    "wan 480": "Wan 2.1, 480 px, 81 frames, 12 steps",
}
ASKED = {"`speedup=1.5`": "speed-up 1.5", "`2`": "speed-up 2", "`3`": "speed-up 3"}
OTHERS = {
    "DeepCache 2": "DeepCache, every 2nd step",
    "DeepCache 3": "DeepCache, every 3rd step",
    "tomesd 0.5": "tomesd",
    "`ratio=0.5`": "ratio 0.5",
    "shared plan": "shared plan",
    "whole blocks": "whole blocks",
}
# The video model has fewer steps than usual: 50 would take minutes.
STEPS = {"sd15": 20, "sdxl": 30, "sd3": 28, "flux": 28, "wan": 12}
WARM_UP_STEPS = 6


class Run:
    """The options of a run, its record, and the time that is left.

    Attributes:
        device: that is measured.
        on_gpu: whether it is a GPU with CUDA's events and graphs.
        tiny: whether models are small and nothing is repeated.
        half: the dtype of most models.
        folder: where the record and the pictures are.
        variants: the names of the variants that are timed in turns; empty: all.
        part: name of the running part.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.on_gpu, self.tiny = self.device.type == "cuda", options.tiny
        self.half = torch.float32 if self.device.type == "cpu" else torch.float16
        self.folder, self.variants = options.out.parent, options.variants
        self.folder.mkdir(parents=True, exist_ok=True)
        self.part, self.statuses = "", Counter[str]()
        self._record = options.out
        self._ends = self._part_ends = BEGAN + options.limit

    def begin(self, part: str, budget: float) -> None:
        """Begin a part, which has this many seconds."""
        self.part, self._part_ends = part, min(self._ends, time.monotonic() + budget)

    @property
    def left(self) -> float:
        """The seconds that the running part has left. A tiny run has no budgets."""
        return float("inf") if self.tiny else self._part_ends - time.monotonic()

    def measure(self, name: str, measurement: Callable[[], Facts], needs: float = 1.0) -> Facts | None:
        """Record one measurement; None: it failed, or the part has fewer seconds left than it needs."""
        if self.left < needs:
            self.write(name, "left out", needs=needs)
            return None
        try:
            facts = measurement()
        except ImportError as error:
            self.write(name, "absent", error=str(error)[:200])
        except Exception as error:
            shown = f"{type(error).__name__}: {error}"[:600]
            self.write(name, "error", error=shown, traceback=traceback.format_exc()[-3000:])
            if any(words in str(error) for words in LOST):
                raise SystemExit(f"the device is lost: {shown}") from error
        else:
            self.write(name, **facts)
            return facts
        self.free()
        return None

    def write(self, name: str, status: str = "ok", **facts: Any) -> None:
        """Append a line to the record."""
        self.statuses[status] += 1
        now = round(time.monotonic() - BEGAN, 1)
        line = {"part": self.part, "name": name, "status": status, "at_s": now, **facts}
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str, ensure_ascii=False) + "\n")
        print(
            f"[{now:6.1f}] {self.part}: {name}: {facts.get('error') or facts.get('ms') or status}", flush=True
        )

    def free(self) -> None:
        """Free the memory of what is not used any more."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


# Timing


def times_of(run: Run, call: Callable[[], object]) -> Facts:
    """Return the milliseconds of one call on the device, and those until all of it was queued.

    If both are alike, launching kernels takes the time, and not the kernels.
    """
    if not run.on_gpu:
        began = time.perf_counter()
        call()
        return {"ms": round((time.perf_counter() - began) * 1000, 3)}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    call()
    end.record()
    queued = (time.perf_counter() - began) * 1000
    end.synchronize()
    return {"ms": round(start.elapsed_time(end), 3), "queued_ms": round(queued, 3)}


def medians(run: Run, call: Callable[[], object], seconds: float = 0.15) -> Facts:
    """Return the median times of a short call, and on a GPU that of a CUDA graph of it."""
    for _ in range(1 if run.tiny else 3):
        call()
    rows, ends = [], time.monotonic() + seconds
    while not rows or (not run.tiny and time.monotonic() < ends):
        rows.append(times_of(run, call))
    found = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    if run.on_gpu:
        try:
            found["graph_ms"] = _of_graph(run, call)
        except Exception as error:
            found["graph_error"] = f"{type(error).__name__}: {error}"[:200]
    return {**found, "calls": len(rows)}


def _of_graph(run: Run, call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call without the time for launching its kernels."""
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept.append(call())
    return statistics.median(times_of(run, graph.replay)["ms"] for _ in range(10))


def in_turns(
    run: Run,
    name: str,
    variants: Mapping[str, Context],
    call: Callable[[], object],
    rounds: int,
    warm_up: Callable[[], object] | None = None,
    **about: Any,
) -> None:
    """Time variants in interleaved rounds, each round of each variant in a line.

    Round 0 is the warm-up: it runs ``warm_up`` in place of the call, if there is one.
    """
    failed = set(variants) - set(run.variants or variants)
    for turn in range(2 if run.tiny else rounds + 1):
        for variant, context in variants.items():

            def timed(context: Context = context, turn: int = turn) -> Facts:
                if run.on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                with context(), torch.no_grad():
                    facts = times_of(run, call if turn or warm_up is None else warm_up)
                if run.on_gpu:
                    facts["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
                return {"variant": variant, "round": turn, **facts, **about}  # noqa: B023

            if variant not in failed and run.measure(f"{name}: {variant}", timed, 0.5) is None:
                failed.add(variant)


# Models


def build(run: Run, name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Return a denoiser with random weights, made on the device."""
    from tokenmerge_tools.bench.loaded_model import GEOMETRIES, build_denoiser

    geometry = GEOMETRIES[name]
    config = {**geometry.config, **changes, **(TINY[name] if run.tiny else {})}
    model = build_denoiser(dataclasses.replace(geometry, config=config), dtype, run.device, seed=0)
    return model.requires_grad_(False)


class Loop:
    """The denoising loop of a pipeline, without its text encoder and its decoder."""

    def __init__(self, run: Run, name: str, model: Any, height: int, width: int, frames: int = 1) -> None:
        import diffusers

        from tokenmerge_tools.bench.loaded_model import example_inputs

        is_unet = hasattr(model, "down_blocks")
        # These schedulers do not wait for the device, so that only token merging could.
        self.scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        if is_unet:
            self.scheduler = diffusers.EulerDiscreteScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
            )
        setattr(self, "unet" if is_unet else "transformer", model)
        self.model, self.name, self.is_unet = model, name, is_unet
        self.steps = 5 if run.tiny else STEPS[name]
        self.do_classifier_free_guidance = name != "flux"
        self.guidance_scale = 3.0
        self.copies = 2 if self.do_classifier_free_guidance else 1
        args, self.inputs = example_inputs(
            model, (height // 8, width // 8), self.copies, guided=self.copies == 2, frames=frames
        )
        sample = args[0] if args else self.inputs.pop("hidden_states")
        del self.inputs["timestep"]
        self.noise = sample[:1].clone()

    def call(self, latents: Tensor, t: Tensor) -> Tensor:
        """Call the model once, as pipelines do."""
        sample = torch.cat([latents] * self.copies)
        if self.is_unet:
            return self.model(sample, t, **self.inputs, return_dict=False)[0]
        timestep = t.expand(len(sample)).to(sample.dtype) / (1000 if self.name == "flux" else 1)
        return self.model(hidden_states=sample, timestep=timestep, **self.inputs, return_dict=False)[0]

    def one(self) -> Tensor:
        """Call the model once in the middle of a generation."""
        return self.call(self.noise, torch.full((), 500.0, device=self.noise.device))

    def __call__(self, until: int | None = None, noted: Callable[[int], object] | None = None) -> Tensor:
        """Denoise, all steps or the first of them; ``noted`` is called before each step."""
        self.scheduler.set_timesteps(self.steps, device=self.noise.device)
        latents = self.noise * (float(self.scheduler.init_noise_sigma) if self.is_unet else 1)
        for index, t in enumerate(self.scheduler.timesteps[:until]):
            if noted is not None:
                noted(index)
            given = self.scheduler.scale_model_input(latents, t) if self.is_unet else latents
            noise = self.call(given.to(self.noise.dtype), t)
            if self.copies == 2:
                without, with_text = noise.chunk(2)
                noise = without + self.guidance_scale * (with_text - without)
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0].to(self.noise.dtype)
        return latents


@contextlib.contextmanager
def default(loop: Any, speedup: float = 2.0, fewest: int | None = None) -> Iterator[Any]:
    """Apply the default method; ``fewest`` replaces the number of tokens from which merging pays here."""
    with contextlib.ExitStack() as stack:
        if fewest is not None:
            stack.enter_context(mock.patch("tokenmerge.default_method.fewest_tokens", return_value=fewest))
        yield stack.enter_context(token_merging(loop, speedup=speedup))


@contextlib.contextmanager
def without_estimate(loop: Any) -> Iterator[None]:
    """Apply the default method without what it computes for its estimate of closeness."""
    noted = ("blocks.skipping._note_forecast", "memory.run_log.RunLog.note_output")
    with contextlib.ExitStack() as stack:
        for name in noted:
            stack.enter_context(mock.patch(f"tokenmerge.runtime.{name}"))
        yield stack.enter_context(default(loop))


@contextlib.contextmanager
def preferring(kernel: str, inner: Context = contextlib.nullcontext) -> Iterator[None]:
    """Prefer an attention kernel, with the others where it takes no such attention."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([KERNELS[kernel], *others], set_priority=True), inner():
        yield


@contextlib.contextmanager
def tomesd(loop: Loop, ratio: float = 0.5) -> Iterator[None]:
    from tokenmerge_tools.variants.contexts import tomesd

    with tomesd(loop.model, ToMeConfig(ratio=ratio)):
        yield


@contextlib.contextmanager
def deepcache(loop: Loop, interval: int) -> Iterator[None]:
    from tokenmerge_tools.variants.caches import deepcache

    with deepcache(loop, None, interval):
        yield


def variants_of(loop: Loop, whole: bool) -> dict[str, Context]:
    """Return the variants of a single call of the model, or of a whole generation."""
    dense: dict[str, Context] = {
        "dense": contextlib.nullcontext,
        "dense, flash": partial(preferring, "flash"),
        "dense, cuDNN": partial(preferring, "cuDNN"),
    }
    merged: dict[str, Context] = {
        "ratio 0.5": partial(token_merging, loop, ratio=0.5),
        "shared plan": partial(token_merging, loop, SHARED),
    }
    if not loop.is_unet:
        block = dataclasses.replace(SHARED, scope="block")
        merged["whole blocks"] = partial(token_merging, loop, block)
    others: dict[str, Context] = {"tomesd": partial(tomesd, loop)} if loop.is_unet else {}
    if not whole:
        return dense | merged | others
    del dense["dense, flash"]  # what PyTorch takes by itself, as single calls show
    asked: dict[str, Context] = {
        "speed-up 2": partial(default, loop),
        "speed-up 1.5": partial(default, loop, 1.5),
        "speed-up 3": partial(default, loop, 3.0),
        "speed-up 2, cuDNN": partial(preferring, "cuDNN", partial(default, loop)),
        "speed-up 2, step reuse alone": partial(default, loop, fewest=10**9),
        "speed-up 2, no estimate": partial(without_estimate, loop),
        "speed-up 2, merging on all grids": partial(default, loop, fewest=0),
    }
    if loop.is_unet:
        others["DeepCache, every 2nd step"] = partial(deepcache, loop, 2)
        others["DeepCache, every 3rd step"] = partial(deepcache, loop, 3)
    return dense | asked | merged | others


# Parts


def env(run: Run) -> None:
    """Record the versions, the card, and how fast it copies, multiplies and launches."""

    def versions() -> Facts:
        import platform
        from importlib import metadata

        packages = ("torch", "triton", "diffusers", "transformers", "tomesd", "DeepCache", "cache-dit")
        found = {"tokenmerge": tokenmerge.__version__, "python": platform.python_version()}
        for package in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(package)
        if run.on_gpu:
            card = torch.cuda.get_device_properties(run.device)
            found |= {"card": card.name, "gib": round(card.total_memory / 2**30, 1)}
            found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return found

    def ceilings() -> Facts:
        side = 128 if run.tiny else 8192
        x = torch.randn(side, side, device=run.device).to(torch.bfloat16)
        values = torch.randn(2**16 if run.tiny else 2**28, device=run.device)
        copy, one = torch.empty_like(values), torch.zeros(1, device=run.device)
        launches = times_of(run, lambda: [one.add_(1) for _ in range(1000)])
        return {
            "copy_tb_per_s": round(8e-9 * values.numel() / medians(run, lambda: copy.copy_(values))["ms"], 3),
            "bfloat16_tflop_per_s": round(2e-9 * side**3 / medians(run, lambda: x @ x)["ms"], 1),
            "us_of_a_launch": launches.get("queued_ms", launches["ms"]),
            "us_of_a_tiny_kernel": launches["ms"],
        }

    run.measure("versions", versions)
    run.measure("ceilings", ceilings)


def attention(run: Run) -> None:
    """Time the parts of merged attention one by one, at the shapes of the models, with each kernel."""
    widths = {
        "sd15": (2, 320, 8, 2),
        "sdxl": (2, 640, 10, 5),
        "sd3": (2, 1536, 24, 24),
        "flux": (1, 3072, 24, 28),
    }
    for name, (batch, channels, heads, blocks) in widths.items():

        def fewest(
            batch: int = batch, channels: int = channels, heads: int = heads, n: int = blocks
        ) -> Facts:
            began = time.monotonic()
            channels = 32 if run.tiny else channels
            attention = calibration.Attention(run.device, run.half, batch, channels, heads if n else 1, n)
            found = calibration.measure_fewest_tokens(attention)
            return {"tokens": found, "seconds": round(time.monotonic() - began, 2)}

        if not run.tiny or name == "sd15":
            run.measure(f"fewest tokens: {name}", fewest, 3)
    shapes = {
        "sd15 512": (2, (1, 64, 64), 320, 8),
        "sd15 768": (2, (1, 96, 96), 320, 8),
        "sd15 1024": (2, (1, 128, 128), 320, 8),
        "sdxl 1024": (2, (1, 64, 64), 640, 10),
        "sd3 1024": (2, (1, 64, 64), 1536, 24),
        "flux 1024": (1, (1, 64, 64), 3072, 24),
        "wan 480p": (1, (21, 30, 52), 1536, 12),
    }
    for name, (batch, grid, channels, heads) in shapes.items():
        if run.tiny:
            grid, channels, heads = (1, 16, 16), 32, 4
        with torch.no_grad():
            _parts_of_attention(run, name, batch, grid, channels, heads)
        run.free()
        if run.tiny:
            return


def _parts_of_attention(
    run: Run, name: str, batch: int, grid: tuple[int, int, int], channels: int, heads: int
) -> None:
    n = grid[0] * grid[1] * grid[2]
    x, weights = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(run.device, run.half)
        for shape in ((batch, n, channels), (4 * channels, channels))
    )
    layer = calibration.self_attention(weights / channels**0.5, heads)
    step = torch.zeros((), dtype=torch.int64, device=run.device)
    make = partial(PLANNERS["tiled"], x, grid, n // 2, ToMeConfig(ratio=0.5, planner="tiled"), step)
    if run.measure(f"{name}: plan, tiled", lambda: medians(run, make)) is None:
        return
    plan = make()
    merged, logits = plan.merge(x), plan.sizes.log()
    columns = partial(_by_columns, merged, weights / channels**0.5, heads, plan.sizes)
    for what, call in {"merge": lambda: plan.merge(x), "unmerge": lambda: plan.unmerge(merged)}.items():
        run.measure(f"{name}: {what}", partial(medians, run, call))
    for what, call in {
        "dense": partial(layer, x),
        "merged": partial(layer, merged),
        "merged, proportional": partial(layer, merged, logits),
        "merged, proportional by columns": columns,
    }.items():
        run.measure(f"{name}: {what}", partial(medians, run, call))
        for kernel in KERNELS if what == "dense" or "columns" in what else ():
            run.measure(f"{name}: {what}, {kernel}", partial(_with_kernel, run, call, kernel))


def _by_columns(x: Tensor, weights: Tensor, heads: int, sizes: Tensor) -> Tensor:
    """Compute proportional attention without a mask, with more channels for each head."""
    channels = weights.shape[1]
    project, out = weights.split((3 * channels, channels))
    q, k, v = F.linear(x, project).unflatten(-1, (3, heads, -1)).unbind(2)

    def kernel(**given: Any) -> Tensor:
        heads_first = {
            name: part.transpose(1, 2) if isinstance(part, Tensor) else part for name, part in given.items()
        }
        return F.scaled_dot_product_attention(**heads_first).transpose(1, 2)

    return F.linear(attend_by_columns(kernel, q, k, v, sizes).flatten(2), out)


def _with_kernel(run: Run, call: Callable[[], object], kernel: str) -> Facts:
    """Return the times with one attention kernel, or why PyTorch refuses it."""
    try:
        with sdpa_kernel(KERNELS[kernel]):
            return medians(run, call)
    except RuntimeError as error:
        return {"refused": str(error)[:150]}


def correct(run: Run) -> None:
    """Compare the device with the CPU: plans, results, seeds, removal; and count where it is waited for."""
    side = 16 if run.tiny else 64
    smooth = torch.randn(2, 320, side // 4, side // 4, generator=torch.Generator().manual_seed(1))
    x = F.interpolate(smooth, (side, side), mode="bicubic").flatten(2).transpose(1, 2).contiguous()
    for planner in PLANNERS.keys() - {"importance"}:  # which needs guidance

        def plans(planner: str = planner) -> Facts:
            make, step = PLANNERS[planner], torch.tensor(7)
            config = ToMeConfig(ratio=0.5, planner=planner)
            expected = make(x, (1, side, side), side * side // 2, config, step).labels()
            facts: Facts = {}
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                there = x.to(run.device, dtype), step.to(run.device)
                found, again = (
                    make(there[0], (1, side, side), side * side // 2, config, there[1]).labels()
                    for _ in range(2)
                )
                other = (found.cpu() != expected).float().mean()
                facts[f"other_labels_{dtype}"] = round(float(other), 5)
                facts[f"same_twice_{dtype}"] = torch.equal(found, again)
            return facts

        run.measure(f"plan: {planner}", plans)
    for name in ("sd15", "flux"):
        if run.measure(f"{name}: seeds and removal", partial(_seeds_and_removal, run, name), 5):
            run.measure(f"{name}: dtypes", partial(_dtypes, run, name), 5)
            run.measure(f"{name}: waits", partial(_waits, run, name), 5)
        run.free()


def _small(run: Run, name: str, dtype: torch.dtype) -> Loop:
    """Return a loop with a small model of real width."""
    few = {"num_layers": 1, "num_single_layers": 2} if name == "flux" else {"layers_per_block": 1}
    side = 128 if run.tiny else 512
    return Loop(run, name, build(run, name, dtype, **few), side, side)


def _settings(loop: Loop) -> dict[str, Context]:
    return {
        "speed-up 2": partial(default, loop, fewest=0),
        "ratio 0.5": partial(token_merging, loop, ratio=0.5),
        "shared plan": partial(token_merging, loop, SHARED),
        "toma": partial(token_merging, loop, "toma"),
    }


@torch.no_grad()
def _seeds_and_removal(run: Run, name: str) -> Facts:
    """Return the largest differences of two runs with one seed, at no speed-up, and after removal."""
    loop = _small(run, name, torch.float32)
    dense, facts = loop(), {}
    facts["dense twice"] = float((loop() - dense).abs().max())
    with default(loop, 1.0):
        facts["speed-up 1"] = float((loop() - dense).abs().max())
    for variant, context in _settings(loop).items():
        with context():
            first, second = loop(), loop()
        facts[f"{variant}, twice"] = float((first - second).abs().max())
        facts[f"{variant}, removed"] = float((loop() - dense).abs().max())
        facts[f"{variant}, error"] = round(_error(first, dense), 6)
    return facts


@torch.no_grad()
def _dtypes(run: Run, name: str) -> Facts:
    """Return the errors to float32 on the device, dense and merged: half precision may change which merge."""
    facts, expected = {}, {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        loop = _small(run, name, dtype)
        for variant, context in (("dense", contextlib.nullcontext), *_settings(loop).items()):
            with context():
                found = loop(2)
            error = _error(found, expected.setdefault(variant, found))
            facts[f"{variant}, {dtype}"] = round(error, 6)
    return facts


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.no_grad()
def _waits(run: Run, name: str) -> Facts:
    """Return how many times each step waits for the device, and the lines that ask. Only CUDA counts them."""
    loop, facts = _small(run, name, torch.float32), {"counted": run.on_gpu}
    for variant, context in (("dense", contextlib.nullcontext), *_settings(loop).items()):
        with context():
            loop()  # kernels are loaded
            steps, lines = Counter[int](), Counter[str]()
            now = [-1]

            def show(
                message: Any,
                *_: Any,
                steps: Counter[int] = steps,
                lines: Counter[str] = lines,
                now: list[int] = now,
            ) -> None:
                if "synchronizing" in str(message):
                    frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
                    steps[now[0]] += 1
                    lines[f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"] += 1

            with warnings.catch_warnings(), mock.patch("warnings.showwarning", show):
                warnings.simplefilter("always")
                if run.on_gpu:
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    loop(noted=partial(now.__setitem__, 0))
                finally:
                    if run.on_gpu:
                        torch.cuda.set_sync_debug_mode("default")
        facts[variant] = {"steps": dict(steps), "lines": dict(lines.most_common(8))}
    return facts


def model(
    run: Run, name: str, *sizes: tuple[int, int], frames: int = 1, dtype: torch.dtype | None = None
) -> None:
    """Time calls and generations of a model at some sizes, and record what each step of the default does."""
    built: list[Any] = []

    def make() -> Facts:
        built.append(build(run, name, dtype or run.half))
        return {"parameters": sum(p.numel() for p in built[0].parameters()), "dtype": str(dtype or run.half)}

    if run.measure(f"{name}: build", make, 10) is None:
        return
    for height, width in ((128, 128),) if run.tiny else sizes:
        loop = Loop(run, name, built[0], height, width, 5 if run.tiny and frames > 1 else frames)
        about = {"size": [height, width], "frames": frames, "steps": loop.steps}
        single, whole = variants_of(loop, False), variants_of(loop, True)
        if frames > 1:  # a round of all variants would take minutes
            whole = {
                variant: context
                for variant, context in whole.items()
                if variant in ("dense", "dense, cuDNN", "shared plan", "speed-up 3")
                or variant.startswith("speed-up 2")
            }
        in_turns(run, f"{name} {height}, one call", single, loop.one, 5 if frames == 1 else 1, **about)
        warm_up = partial(loop, WARM_UP_STEPS if frames == 1 else 2)
        in_turns(run, f"{name} {height}, generation", whole, loop, 3, warm_up, **about)
        run.measure(f"{name} {height}: steps of speed-up 2", partial(_steps, loop), 5)


@torch.no_grad()
def _steps(loop: Loop) -> Facts:
    with default(loop) as patch:
        patch.record_steps()
        loop()
        rows = [[row.step, row.kind, row.tokens, row.merged_tokens, row.seconds] for row in patch.steps]
        return {"settings": str(patch), "steps": rows}


def pictures(run: Run) -> None:
    """Draw a picture with each bundled model, dense and at a speed-up of 2, with seconds on this device."""
    for name in ("emoji-unet", "emoji-mmdit"):
        run.measure(name, partial(_pair, run, name), 6)
        run.free()


def _pair(run: Run, name: str) -> Facts:
    import diffusers
    from PIL import Image, ImageDraw

    from tokenmerge_tools import demo
    from tokenmerge_tools.closeness import psnr
    from tokenmerge_tools.sheets import as_tensor

    of = {"emoji-unet": "StableDiffusionPipeline", "emoji-mmdit": "StableDiffusion3Pipeline"}[name]
    pipe = getattr(diffusers, of).from_pretrained(demo.path(name), torch_dtype=run.half).to(run.device)
    pipe.set_progress_bar_config(disable=True)
    side, steps = (64, 4) if run.tiny else (256, 20)

    def draw() -> Any:
        return pipe(
            "a red apple on a light blue background",
            height=side,
            width=side,
            num_inference_steps=steps,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(0),
        ).images[0]

    drawn, ms = [], {}
    for variant, context in (("dense", contextlib.nullcontext), ("speed-up 2", partial(default, pipe))):
        with context():
            drawn.append(draw())  # also the warm-up
            ms[variant] = min(times_of(run, draw)["ms"] for _ in range(1 if run.tiny else 3))
    sheet = Image.new("RGB", (2 * side, side + 16), "white")
    for place, (picture, variant) in enumerate(zip(drawn, ms, strict=True)):
        sheet.paste(picture, (place * side, 0))
        ImageDraw.Draw(sheet).text(
            (place * side + 2, side + 2), f"{variant}: {ms[variant] / 1000:.2f} s", "black"
        )
    sheet.save(run.folder / f"gpu-{name}.png")
    closeness = psnr(as_tensor(drawn[1:]), as_tensor(drawn[:1]))
    facts = {"size": side, "steps": steps, "all_ms": ms, "psnr_db": round(float(closeness.mean()), 2)}
    return {**facts, "speedup": round(ms["dense"] / ms["speed-up 2"], 3), "file": f"gpu-{name}.png"}


def profile(run: Run) -> None:
    """Count the kernels of one call, and their time by name."""
    for name, few in (("sd15", {}), ("flux", {"num_layers": 1, "num_single_layers": 1})):
        side = 128 if run.tiny else 512 if name == "sd15" else 1024
        loop = Loop(run, name, build(run, name, run.half, **few), side, side)
        for variant, context in variants_of(loop, False).items():
            run.measure(f"{name}: {variant}", partial(_kernels, run, loop, context), 2)
        run.free()


@torch.no_grad()
def _kernels(run: Run, loop: Loop, context: Context) -> Facts:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if run.on_gpu else []
    with context():
        loop.one()
        with torch.profiler.profile(activities=kinds) as seen:
            loop.one()
            if run.on_gpu:
                torch.cuda.synchronize()
    there = [e for e in seen.events() if "CUDA" in str(e.device_type)]
    longest = Counter[str]()
    for event in there:
        longest[event.name[:80]] += event.device_time_total
    return {
        "kernels": len(there),
        "device_us": round(sum(longest.values())),
        "operations": sum(e.name.startswith("aten::") for e in seen.events()),
        "longest_us": {kernel: round(us) for kernel, us in longest.most_common(8)},
    }


def compiled(run: Run) -> None:
    """Compile the blocks of a model, and time generations with them."""
    models = {"flux": _bfloat16(run), "sdxl": run.half, "sd15": run.half}
    for name, dtype in list(models.items())[: 1 if run.tiny else None]:
        loops: list[Loop] = []
        run.measure(f"{name}: compile", partial(_compile, run, name, dtype, loops), 30)
        for loop in loops:
            chosen = ("dense", "speed-up 2", "shared plan")[: 2 if run.tiny else None]
            variants = {key: context for key, context in variants_of(loop, True).items() if key in chosen}
            in_turns(run, f"{name}, compiled blocks", variants, loop, 2)
        torch._dynamo.reset()
        run.free()


def _compile(run: Run, name: str, dtype: torch.dtype, loops: list[Loop]) -> Facts:
    """Add a loop whose model compiles its blocks when they first run."""
    side = 128 if run.tiny else 1024
    loop = Loop(run, name, build(run, name, dtype), side, side)
    loop.model.compile_repeated_blocks(fullgraph=True, backend="eager" if run.tiny else "inductor")
    loops.append(loop)
    return {"size": [side, side]}


# The parts in the order of their value, with their seconds.
PARTS: dict[str, tuple[float, Callable[[Run], None]]] = {
    "env": (45, env),
    "attention": (40, attention),
    "correct": (60, correct),
    "sd15": (125, lambda run: model(run, "sd15", (512, 512), (768, 768), (1024, 1024))),
    "flux": (130, lambda run: model(run, "flux", (1024, 1024), dtype=_bfloat16(run))),
    "pictures": (35, pictures),
    "profile": (20, profile),
    "sdxl": (90, lambda run: model(run, "sdxl", (1024, 1024))),
    "sd3": (55, lambda run: model(run, "sd3", (1024, 1024))),
    "compile": (180, compiled),
    "wan": (110, lambda run: model(run, "wan", (480, 832), frames=81, dtype=_bfloat16(run))),
}


def _bfloat16(run: Run) -> torch.dtype:
    return run.half if run.device.type == "cpu" else torch.bfloat16


class Measured(NamedTuple):
    """The medians over the rounds of one variant.

    Attributes:
        speedups: over the fastest dense variant of the same round; empty where none was measured.
        gb: the peak of memory in the round in which it was lowest: others were still being freed.
        more_gb: how much higher the peak is than that of the dense model in the same round; in the last
            record alone, since the code of the others took more.
    """

    ms: float
    speedups: Sequence[float]
    gb: float
    more_gb: float

    @property
    def speedup(self) -> float:
        """Return the median of the speed-ups."""
        return statistics.median(self.speedups) if self.speedups else float("nan")

    def __str__(self) -> str:
        """Return the speed-up, with the lowest and the highest where they differ by more than a tenth."""
        least, most = min(self.speedups), max(self.speedups)
        if most - least <= self.speedup / 10:
            return f"{self.speedup:.2f}×"
        return f"{self.speedup:.1f}× ({least:.1f}–{most:.1f})"


Row = dict[str, Measured]  # by variant


def speedups(*records: Path) -> dict[str, Row]:
    """Return what was measured, by measurement and variant.

    Lines of the status "former method" are of code that has changed since.
    """
    rounds: dict[str, dict[str, dict[tuple[Path, int], Facts]]] = {}
    for record in records:
        for line in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
            if line["status"] == "ok" and line.get("round"):
                name = line["name"].removesuffix(f": {line['variant']}")
                own = rounds.setdefault(name, {}).setdefault(line["variant"], {})
                own[record, line["round"]] = line
    found: dict[str, Row] = {}
    for name, variants in rounds.items():
        dense = [own for variant, own in variants.items() if variant.startswith("dense")]
        for variant, own in variants.items():
            beside = {turn: [one[turn] for one in dense if turn in one] for turn in own}
            ratios = [
                min(one["ms"] for one in lines) / own[turn]["ms"] for turn, lines in beside.items() if lines
            ]
            last = list(own)[-1][0]
            more = [
                _gb(own[turn]) - _gb(lines[0]) for turn, lines in beside.items() if lines and turn[0] == last
            ]
            found.setdefault(name, {})[variant] = Measured(
                statistics.median(line["ms"] for line in own.values()),
                ratios,
                min(map(_gb, own.values())),
                statistics.median(more) if more else float("nan"),
            )
    return found


def _gb(line: Facts) -> float:
    return float(line.get("peak_mib", float("nan")) * 2**20 / 1e9)


def table(record: Path) -> str:
    """Return the speed-ups of a record, as Markdown."""
    rows = ["| measurement | variant | ms | speed-up |", "|---|---|---:|---:|"]
    for name, variants in speedups(record).items():
        for variant, own in variants.items():
            rows.append(f"| {name} | {variant} | {own.ms:.1f} | {own.speedup:.2f} |")
    return "\n".join(rows)


def page_tables(cards: Mapping[str, Sequence[Path]]) -> str:
    """Return the speed-ups of whole generations on each card, for the documentation."""
    found = {card: speedups(*records) for card, records in cards.items()}
    parts = []
    for card, own in found.items():
        head = [f"| {card} | dense | {' | '.join(ASKED)} | memory | extra memory at `2` |"]
        parts.append([*head, "|---|" + "---:|" * (len(ASKED) + 3), *_rows(own, _asked)])
    parts.append(["## Other packages, and merging alone"])
    parts.append(
        [
            "A *shared plan* compares tokens once for neighbouring blocks, and *whole blocks* also merges",
            "around MLPs. DeepCache's number is its interval of complete steps.",
        ]
    )
    for card, own in found.items():
        head = [f"| {card} | {' | '.join(OTHERS)} |", "|---|" + "---:|" * len(OTHERS)]
        images = {key: row for key, row in own.items() if "ratio 0.5" in row}
        parts.append([*head, *_rows(images, _others)])
    return "\n\n".join("\n".join(part) for part in parts)


def _rows(found: dict[str, Row], cells: Callable[[Row], Sequence[str]]) -> Iterator[str]:
    for key, shown in GENERATIONS.items():
        if row := found.get(f"{key}, generation"):
            yield f"| {shown} | {' | '.join(cells(row))} |"


def _asked(row: Row) -> Sequence[str]:
    dense, more = row["dense"], row["speed-up 2"].more_gb
    asked = (str(row[name]) if name in row else "" for name in ASKED.values())
    return [f"{dense.ms / 1000:.2f} s", *asked, f"{dense.gb:.1f} GB", f"{1000 * more:.0f} MB"]


def _others(row: Row) -> Sequence[str]:
    return [f"{row[name].speedup:.1f}×" if name in row else "" for name in OTHERS.values()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, nothing repeated")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="the record; lines are appended")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--variants", type=lambda given: given.split("/"), default=[], help="of dense/ratio 0.5/…"
    )
    parser.add_argument("--limit", type=float, default=525, help="seconds for the run, imports included")
    parser.add_argument("--show", type=Path, help="show the table of a record, and measure nothing")
    parser.add_argument("--write", type=Path, nargs="*", help="write docs/gpu.md from records; default: ours")
    options = parser.parse_args(arguments)
    if options.show is not None:
        print(table(options.show))
        return
    if options.write is not None:
        before, rest = PAGE.read_text(encoding="utf-8").split("<!-- measured -->\n", 1)
        after = rest.split("<!-- end of measured -->", 1)[1]
        tables = page_tables({"one generation": options.write} if options.write else CARDS)
        made = f"<!-- measured -->\n{tables}\n<!-- end of measured -->"
        PAGE.write_text(before + made + after, encoding="utf-8")
        return
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not options.tiny:
        faulthandler.dump_traceback_later(options.limit + 10, exit=True)  # a run that hangs
    run = Run(options)
    with mock.patch.object(calibration, "SIDES", (8,)) if options.tiny else contextlib.nullcontext():
        try:
            for part in parts:
                budget, measure = PARTS[part]
                run.begin(part, budget)
                began = time.monotonic()
                run.measure("part", lambda measure=measure: measure(run) or {})
                run.write("end", "done", seconds=round(time.monotonic() - began, 1))
                run.free()
        finally:
            run.begin("end", 0)
            run.write("summary", "done", **run.statuses)
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
