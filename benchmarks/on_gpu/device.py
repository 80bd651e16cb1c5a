"""What the device is, and how fast it takes the parts of merged attention one by one."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from functools import partial
from importlib import metadata

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

import tokenmerge
from on_gpu.biases import BIASES, by_groups
from on_gpu.clock import medians, times_of
from on_gpu.record import Facts, Run
from on_gpu.variants import KERNELS
from tokenmerge import ToMeConfig
from tokenmerge.ops.once import once
from tokenmerge.ops.plan import MergePlan
from tokenmerge.planners import PLANNERS

PACKAGES = ("torch", "triton", "diffusers", "transformers", "tomesd", "DeepCache", "cache-dit")
LAUNCHES = 1000
# (images in a batch, (frames, rows, columns) of tokens, channels, heads) of self-attention. Guidance doubles
# the batch. The shapes that should gain most come first.
SHAPES = {
    "flux 1024": (1, (1, 64, 64), 3072, 24),
    "wan 480p": (1, (21, 30, 52), 1536, 12),
    "sd15 1024": (2, (1, 128, 128), 320, 8),
    "sd3 1024": (2, (1, 64, 64), 1536, 24),
    "flux 2048": (1, (1, 128, 128), 3072, 24),
    "wan 720p": (1, (21, 45, 80), 1536, 12),
    "sd15 768, batch 16": (32, (1, 96, 96), 320, 8),
    "sd15 512": (2, (1, 64, 64), 320, 8),
    "sd15 512, batch 16": (32, (1, 64, 64), 320, 8),
    "sd15 768": (2, (1, 96, 96), 320, 8),
    "sdxl 1024": (2, (1, 64, 64), 640, 10),
}
TINY_SHAPE = (2, (1, 16, 16), 32, 4)
# The ways of proportional attention that are compiled for each shape, and the seconds that one needs at most.
# They come after all others.
COMPILED = ("FlexAttention",)
COMPILE_SECONDS = 10.0


def env(run: Run) -> None:
    """Record the versions, the card, and how fast it copies, multiplies and launches."""
    run.measure("versions", partial(_versions, run))
    run.measure("ceilings", partial(_ceilings, run))


def _versions(run: Run) -> Facts:
    found: Facts = {"tokenmerge": tokenmerge.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if run.on_gpu:
        card = torch.cuda.get_device_properties(run.device)
        found |= {"card": card.name, "gib": round(card.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def _ceilings(run: Run) -> Facts:
    side = 128 if run.tiny else 8192
    x = torch.randn(side, side, device=run.device).to(torch.bfloat16)
    values = torch.randn(2**16 if run.tiny else 2**28, device=run.device)
    copy = torch.empty_like(values)
    one = torch.zeros(1, device=run.device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    launch()  # the first time includes loading the kernel
    launches = times_of(run, launch)
    return {
        "copy_tb_per_s": round(8e-9 * values.numel() / medians(run, lambda: copy.copy_(values))["ms"], 3),
        "bfloat16_tflop_per_s": round(2e-9 * side**3 / medians(run, lambda: x @ x)["ms"], 1),
        "us_of_a_launch": launches.get("queued_ms", launches["ms"]) * 1000 / LAUNCHES,
        "us_of_a_tiny_kernel": launches["ms"] * 1000 / LAUNCHES,
    }


def attention(run: Run) -> None:
    """Time the parts of merged attention one by one at the shapes of models, FlexAttention last."""
    shapes = {"tiny": TINY_SHAPE} if run.tiny else SHAPES
    for part in (_parts_of_attention, _flex_attention):
        for name, shape in shapes.items():
            with torch.no_grad():
                part(run, name, _Inputs(run, *shape))
            run.free()


class _Layer:
    """Self-attention with random weights, from tokens to tokens."""

    def __init__(self, weights: Tensor, heads: int) -> None:
        self.heads = heads
        self.project, self.out = weights.split((3 * weights.shape[1], weights.shape[1]))

    def __call__(self, x: Tensor, attend: Callable[..., Tensor] = F.scaled_dot_product_attention) -> Tensor:
        q, k, v = F.linear(x, self.project).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.linear(attend(q, k, v).transpose(1, 2).flatten(2), self.out)


class _Inputs:
    """Tokens of one shape, a layer for them, and a plan that merges half of them."""

    def __init__(self, run: Run, batch: int, grid: tuple[int, int, int], channels: int, heads: int) -> None:
        self.n = grid[0] * grid[1] * grid[2]
        self.grid = grid
        noise = torch.Generator(run.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=noise, device=run.device).to(run.half)

        self.x = random(batch, self.n, channels)
        if batch > 1:  # guidance holds each image twice
            self.x[batch // 2 :] = self.x[: batch // 2]
        weights = random(4 * channels, channels)
        self.layer = _Layer(weights / channels**0.5, heads)
        self.step = torch.zeros((), dtype=torch.int64, device=run.device)
        self.plan = self.make_plan(self.x)
        self.merged = self.plan.merge(self.x)

    def make_plan(self, features: Tensor) -> MergePlan:
        """Make a plan from features in their own precision."""
        config = ToMeConfig(ratio=0.5, planner="tiled")
        plan = PLANNERS["tiled"](features, self.grid, self.n // 2, config, self.step)
        assert isinstance(plan, MergePlan)
        return plan

    def proportional(self, way: Callable[..., Tensor], **settings: bool) -> Tensor:
        """Attend to the merged tokens by their sizes."""
        return self.layer(self.merged, partial(way, sizes=self.plan.sizes, **settings))


def _parts_of_attention(run: Run, name: str, given: _Inputs) -> None:
    x = given.x
    plan = given.plan
    exact = given.x.float()
    timed: dict[str, Callable[[], object]] = {
        "plan, float32": partial(given.make_plan, exact),
        "plan, half precision": partial(given.make_plan, x),
        "plan, half precision, with the sort of the groups": lambda: given.make_plan(x)._groups(),
        "merge, embedding_bag": partial(_merge_by_bag, plan, x),
        "merge, index_add_": partial(_merge_by_index_add, plan, x),
        "unmerge": partial(plan.unmerge, given.merged),
        "dense": partial(given.layer, x),
        "merged": partial(given.layer, given.merged),
    }
    for way, bias in BIASES.items():
        if way not in COMPILED:
            timed[f"merged, proportional by {way}"] = partial(given.proportional, bias)
    if run.on_gpu:
        cudnn = partial(given.proportional, by_groups, cudnn=True)
        timed["merged, proportional by sorted groups, cuDNN"] = cudnn
    for what, call in timed.items():
        run.measure(f"{name}: {what}", partial(medians, run, call), 0.5)
    for kernel in KERNELS:
        dense = partial(_with_kernel, run, partial(given.layer, x), kernel)
        run.measure(f"{name}: dense, {kernel}", dense, 0.5)


def _flex_attention(run: Run, name: str, given: _Inputs) -> None:
    for way in COMPILED:
        call = partial(given.proportional, BIASES[way])
        needs = COMPILE_SECONDS if run.on_gpu else 0.5
        run.measure(f"{name}: merged, proportional by {way}", partial(medians, run, call), needs)


def _merge_by_bag(plan: MergePlan, x: Tensor) -> Tensor:
    """Make the means of all groups in one kernel, with the sort of the groups known."""
    tokens, starts = once(plan.inverse, "groups", plan._groups)
    return F.embedding_bag(tokens, x.flatten(0, 1), starts, mode="mean")


def _merge_by_index_add(plan: MergePlan, x: Tensor) -> Tensor:
    """Add the rows of the tokens to those of the merged ones, and divide by the sizes."""
    rows = x.flatten(0, 1)
    total = rows.index_select(0, plan.keep.flatten()).float()
    total.index_add_(0, plan.targets.flatten(), rows.index_select(0, plan.sources.flatten()).float())
    return total.div_(plan.sizes.view(-1, 1)).to(x.dtype)


def _with_kernel(run: Run, call: Callable[[], object], kernel: str) -> Facts:
    """Return the times with one attention kernel, or why PyTorch refuses it."""
    try:
        with sdpa_kernel(KERNELS[kernel]):
            return medians(run, call)
    except RuntimeError as error:
        return {"refused": str(error)[:150]}
