"""Measures the number of tokens from which merging saves time on a device, and caches it in a file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import ToMeConfig
from tokenmerge.ops import merge, unmerge
from tokenmerge.planners import PLANNERS

SIDES = (8, 16, 24, 32, 48, 64)  # sides of the token grids that are timed
_BATCH, _ROUNDS = 2, 5


def fewest_tokens(device: torch.device, dtype: torch.dtype, channels: int = 640, heads: int = 8) -> int:
    """Return the fewest tokens for which self-attention is faster with half of the tokens merged.

    It is measured with the settings of ``auto``, once for each device, dtype, width, version of torch and
    number of threads. This takes at most a second or two. The result is stored in :func:`cache_file`; delete
    that file to measure again. If merging was faster on none of the grids, nothing is stored, and the next
    call measures again. ``channels`` and ``heads`` are those of the model's tokens and attention.
    """
    key = f"{_key(device, dtype)}, {heads} × {channels // heads} channels, proportional, corrected, or none"
    file = cache_file()
    known = _read(file)
    if key in known:
        return known[key]
    found = measure_fewest_tokens(device, dtype, channels, heads)
    if found <= SIDES[-1] ** 2:
        _write(file, {**known, key: found})
    return found


def cache_file() -> Path:
    """Return the path of the measurements: ``tokenmerge/fewest_tokens.json`` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:  # a user without a home folder, as in containers
        folder = Path(tempfile.gettempdir())
    return folder / "tokenmerge" / "fewest_tokens.json"


@torch.no_grad()
def measure_fewest_tokens(
    device: torch.device, dtype: torch.dtype, channels: int = 640, heads: int = 8
) -> int:
    """Return the number of tokens of the first grid on which merged self-attention is faster than dense.

    The merged time includes what the default method adds: planning, proportional attention and the
    correction. If there is no such grid, the number is that of a grid twice as wide as the last, because the
    cost of attention grows with the square of the tokens.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    layer = _self_attention(noise(4 * channels, channels) / channels**0.5, heads)
    step = torch.zeros((), dtype=torch.int64, device=device)
    config = ToMeConfig(ratio=0.5, planner="tiled")
    for side in SIDES:
        x = noise(_BATCH, side * side, channels)
        change = layer(x)

        def merged(
            x: Tensor = x, change: Tensor = change, grid: tuple[int, int, int] = (1, side, side)
        ) -> Tensor:
            plan = PLANNERS["tiled"](x, grid, grid[1] * grid[2] // 2, config, step)
            result = unmerge(plan, layer(merge(plan, x), plan.sizes.log()))
            return result + (change - unmerge(plan, merge(plan, change)))

        def dense(x: Tensor = x) -> Tensor:
            return layer(x)

        if _seconds(merged, device) < _seconds(dense, device):
            return side * side
    return (2 * SIDES[-1]) ** 2


def _self_attention(weights: Tensor, heads: int) -> Callable[..., Tensor]:
    """Make self-attention with weights ``[4 * channels, channels]``: queries, keys, values, output."""
    channels = weights.shape[1]
    project, out = weights.split((3 * channels, channels))

    def attend(x: Tensor, logits: Tensor | None = None) -> Tensor:
        q, k, v = F.linear(x, project).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if logits is None else logits[:, None, None].to(x.dtype)
        return F.linear(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2), out)

    return attend


def _seconds(function: Callable[[], Tensor], device: torch.device) -> float:
    """Return the shortest time of several calls after one for warm-up; it has the least noise."""
    times = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _key(device: torch.device, dtype: torch.dtype) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{device.type} {name}{threads}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"


def _read(file: Path) -> dict[str, int]:
    """Read the numbers of tokens in a cache file, without entries that are no positive integers."""
    try:
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, RecursionError):
        return {}
    return {key: tokens for key, tokens in known.items() if type(tokens) is int and tokens > 0}


def _write(file: Path, known: dict[str, int]) -> None:
    """Write the cache file. If it cannot be written, or is damaged, the next call measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=2), encoding="utf-8")
    except OSError:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
