"""Measures the number of tokens from which merging saves time on a device, and caches it in a file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import ToMeConfig
from tokenmerge.planners import PLANNERS

# Not timed: what else a CPU does would change the time, and so the picture. On smaller grids merging mostly
# saved too little (benchmarks/fewest_tokens_cpu.jsonl).
TOKENS_ON_CPU = 1024
# Sides of the token grids that are timed. The time of smaller ones, mostly of launches, says nothing of them.
SIDES = (48, 64, 96, 128)
_RATIO = 0.2  # the lowest ratio of the default method, where merging saves least
_LEAST_SAVED = 0.5  # of the time that would be saved if time were as operations are, docs/gpu.md
_ROUNDS = 5
_ROUND = 0.01  # seconds of a round, as far as it consists of several calls
_WEEK = 7 * 24 * 3600
_SEASON = 13 * _WEEK
_MOST_BYTES = 2**20  # of a file of measurements; a larger one is none
_TRIES, _PAUSE = 20, 0.05  # seconds between two tries to write while another process does
_of_process: dict[str, tuple[int, int]] = {}  # the measurements, where there is no folder to keep them in


class Attention(NamedTuple):
    """Self-attention of a model, for which merging is timed."""

    device: torch.device  # where the model runs
    dtype: torch.dtype  # that it computes in
    batch: int = 2  # of a call of the model
    channels: int = 640  # of its tokens
    heads: int = 8
    blocks: int = 1  # that share a plan


def fewest_tokens(attention: Attention) -> int:
    """Return the fewest tokens for which merging a fifth of them pays in self-attention.

    It pays where it saves at least half as large a part of the time as of the operations. With less, a
    generation would be much slower than its plan says. On a CPU the number is always the same. On another
    device it is measured with what the default method adds to a merged step, once for each attention and
    version of torch. This takes a second or two on an H200. The result is stored in :func:`cache_file`;
    delete that file to measure again. It holds for three months, because the device may have been busy with
    something else. If merging paid on no grid, it holds for a week.
    """
    device, dtype, batch, channels, heads, blocks = attention
    if device.type == "cpu":
        return TOKENS_ON_CPU
    shape = f"batch {batch}, {heads} × {channels // heads} channels, {blocks} blocks a plan"
    key = f"{_key(device, dtype)}, {shape}, proportional, corrected, {_RATIO:g}, {_LEAST_SAVED:g}"
    file, now = cache_file(), time.time()
    known = _of_process if file is None else _read(file)
    if key in known:
        tokens, measured = known[key]
        if 0 <= now - measured < (_SEASON if tokens <= SIDES[-1] ** 2 else _WEEK):
            return tokens
    found = measure_fewest_tokens(attention), int(now)
    if file is None:
        _of_process[key] = found
    else:
        with contextlib.suppress(OSError):  # the next call measures again
            _write(file, key, found)
    return found[0]


def cache_file() -> Path | None:
    """Return the path of the measurements: ``tokenmerge/fewest_tokens.json`` in the user's cache folder.

    None: the user has no home folder, as in containers. Then each process measures. A folder for temporary
    files would be everybody's.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "tokenmerge" / "fewest_tokens.json"


@torch.no_grad()
def measure_fewest_tokens(attention: Attention) -> int:
    """Return the number of tokens of the smallest grid on which merging pays, see :func:`fewest_tokens`.

    It has to pay on all larger grids too, as far as there is memory for them. On a device without CUDA, the
    larger half of the grids is left out. The merged time includes what the default method adds: a share of
    the planning, proportional attention and the correction. If there is no such grid, the number is that of a
    grid twice as wide as the last, because the cost of attention grows with the square of the tokens.
    """
    fewest = 2 * SIDES[-1]
    for side in reversed(SIDES if attention.device.type == "cuda" else SIDES[:2]):
        with contextlib.suppress(torch.OutOfMemoryError):
            if not _pays(attention, side):
                break
            fewest = side
    return fewest**2


def _pays(attention: Attention, side: int) -> bool:
    device, dtype, batch, channels, heads, blocks = attention
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    layer = self_attention(noise(4 * channels, channels) / channels**0.5, heads)
    step = torch.zeros((), dtype=torch.int64, device=device)
    n, config = side * side, ToMeConfig(ratio=_RATIO, planner="tiled")
    x = noise(batch, n, channels)
    change = layer(x)
    make_plan = partial(PLANNERS["tiled"], x, (1, side, side), int(n * _RATIO), config, step)
    plan = make_plan()

    def merged() -> Tensor:
        result = plan.unmerge(layer(plan.merge(x), plan.sizes.log()))
        return result + (change - plan.unmerge(plan.merge(change)))

    time_merged = _seconds(make_plan, device) / blocks + _seconds(merged, device)
    # Of the projections, merging saves a part that grows with the ratio; of attention, with its square.
    saved = (2 * channels * _RATIO + n * (1 - (1 - _RATIO) ** 2)) / (2 * channels + n)
    return time_merged <= _seconds(partial(layer, x), device) * (1 - _LEAST_SAVED * saved)


def self_attention(weights: Tensor, heads: int) -> Callable[..., Tensor]:
    """Make self-attention with weights ``[4 * channels, channels]``: queries, keys, values, output."""
    channels = weights.shape[1]
    project, out = weights.split((3 * channels, channels))

    def attend(x: Tensor, logits: Tensor | None = None) -> Tensor:
        q, k, v = F.linear(x, project).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if logits is None else logits[:, None, None].to(x.dtype)
        return F.linear(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2), out)

    return attend


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call: the shortest mean of several rounds, which has the least noise.

    A round is as many calls as fit in a short time, and then one wait for the device, as in a generation.
    """

    def mean_of(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / calls

    mean_of(1)  # for warm-up
    calls = max(1, int(_ROUND / mean_of(1)))
    return min(mean_of(calls) for _ in range(_ROUNDS))


def _key(device: torch.device, dtype: torch.dtype) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device.type} {name}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"


def _read(file: Path) -> dict[str, tuple[int, int]]:
    """Read the numbers of tokens in a cache file and the times of measuring; nothing from a damaged file."""
    try:
        # Opening a named pipe would wait for somebody who writes to it.
        opened = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(opened, encoding="utf-8") as text:
            about = os.fstat(opened)
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
                return {}
            known = json.loads(text.read())
        return {str(key): (int(tokens), int(when)) for key, (tokens, when) in known.items()}
    except Exception:  # whatever is wrong with it, the next call measures again
        return {}


def _write(file: Path, key: str, found: tuple[int, int]) -> None:
    """Add a measurement to a cache file, which is never half written and loses none of other processes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(file.parent):
        number, name = tempfile.mkstemp(dir=file.parent)
        os.close(number)
        part = Path(name)
        try:
            part.write_text(json.dumps({**_read(file), key: found}, indent=2), encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others from writing to a folder within the context; an OSError says that they do not end."""
    if sys.platform == "win32":  # a measurement may be lost there, and is then made again
        yield
        return
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_PAUSE)
        else:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
