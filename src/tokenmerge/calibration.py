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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.ops.once import once
from tokenmerge.ops.plan import Plan
from tokenmerge.ops.sized_attention import Bias, attend_without_mask, choose_bias
from tokenmerge.planners import PLANNERS
from tokenmerge.plans import FewestTokens

# It is not timed, since other work of a CPU would change the time, and so the image. On smaller grids
# merging mostly saved too little (benchmarks/fewest_tokens_cpu.jsonl).
TOKENS_ON_CPU = 1024
# Sides of the token grids that are timed, from 512 × 512 pixels of most transformers on.
SIDES = (32, 48, 64, 96, 128)
# By scope. The first is the lowest ratio of the default method, where merging saves least.
RATIOS: Mapping[str, tuple[float, ...]] = {"layers": (0.2, 0.5), "block": (0.1, 0.2, 0.5)}
_LEAST_SAVED = 0.5  # of the time that would be saved if time were as operations are, docs/gpu.md
_ROUNDS = 4
_ROUND = 0.01  # seconds of a round, as far as it consists of several calls
_MOST_SECONDS = 0.1  # of all rounds, as far as there are several
_WEEK = 7 * 24 * 3600
_SEASON = 13 * _WEEK
_MOST_BYTES = 2**20  # of a file of measurements; a larger one is none
_TRIES = 20  # to write while another process does
_PAUSE = 0.05  # seconds between two of them
_of_process: dict[str, tuple[int, int]] = {}  # the measurements, where there is no folder to keep them in


class TimedMerging(NamedTuple):
    """A kind of merging to time: in the blocks of a model that share a plan."""

    device: torch.device  # where the model runs
    dtype: torch.dtype  # that it computes in
    scope: str = "layers"  # merging in self-attention, or in the "block", which has an MLP too
    has_mask: bool = False  # attention learns the sizes from a mask in any case, as in ComfyUI
    batch: int = 2  # of a call of the model
    channels: int = 640  # of its tokens
    heads: int = 8
    blocks: int = 1  # that share a plan

    @property
    def in_stack(self) -> bool:
        """Whether tokens merge once for all blocks."""
        return self.scope == "block"

    def bias(self, keys: int) -> Bias:
        """Return how attention learns the sizes of so many keys."""
        return choose_bias(
            self.device.type, self.dtype, self.channels // self.heads, keys, has_mask=self.has_mask
        )


def fewest_tokens(*merging: TimedMerging) -> tuple[FewestTokens, ...]:
    """Return the fewest tokens for which each merging pays, for each ratio that is timed.

    It pays where it saves at least half as large a part of the time as of the operations. With less, a
    generation would be much slower than its plan says. On a CPU the number is always the same. On another
    device it is measured with what the default method adds to a merged step, once for each merging and
    version of torch. This should take a second or two. The result is stored in :func:`cache_file`; delete
    that file to measure again. It holds for three months, because the device may have been busy with
    something else. If merging paid on no grid, it holds for a week.
    """
    return tuple(FewestTokens(timed.scope, *found) for timed in merging for found in _fewest_by_ratio(timed))


def _fewest_by_ratio(merging: TimedMerging) -> Sequence[tuple[float, int]]:
    if merging.device.type == "cpu":
        return [(0.0, TOKENS_ON_CPU)]
    ratios = RATIOS[merging.scope]
    keys = [_key(merging, ratio) for ratio in ratios]
    file = cache_file()
    now = time.time()
    known = _of_process if file is None else _read(file)
    if not all(key in known and _holds(*known[key], now) for key in keys):
        measured = measure_fewest_tokens(merging)
        known = {key: (tokens, int(now)) for key, tokens in zip(keys, measured, strict=True)}
        if file is None:
            _of_process.update(known)
        else:
            with contextlib.suppress(OSError):  # the next call measures again
                _write(file, known)
    return [(ratio, known[key][0]) for ratio, key in zip(ratios, keys, strict=True)]


def _holds(tokens: int, measured: int, now: float) -> bool:
    return 0 <= now - measured < (_SEASON if tokens <= SIDES[-1] ** 2 else _WEEK)


def cache_file() -> Path | None:
    """Return the path of the measurements, which is in the user's cache folder.

    It is None if the user has no home folder, as in containers. Then each process measures. A folder for
    temporary files would be everybody's.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "tokenmerge" / "fewest_tokens.json"


@torch.no_grad()
def measure_fewest_tokens(merging: TimedMerging) -> tuple[int, ...]:
    """Return for each ratio the number of tokens of the smallest grid on which merging pays.

    Times on larger grids do not count, nor do those of another ratio. A grid without enough memory is left
    out, as are the two largest grids on a device without CUDA. If there is no such grid, the number is
    that of a grid twice as wide as the last, because the cost of attention grows with the square of the
    tokens.
    """
    sides = SIDES if merging.device.type == "cuda" else SIDES[:-2]
    return tuple(_smallest(merging, sides, ratio) for ratio in RATIOS[merging.scope])


def _smallest(merging: TimedMerging, sides: Sequence[int], ratio: float) -> int:
    for side in sides:
        with contextlib.suppress(torch.OutOfMemoryError):
            if _pays(merging, side, ratio):
                return side**2
    return (2 * SIDES[-1]) ** 2


def _pays(merging: TimedMerging, side: int, ratio: float) -> bool:
    """Return whether merging pays on a grid, by the times of parts: see :func:`fewest_tokens`.

    The merged time includes what the default method adds: planning, proportional attention, and the
    correction.
    """
    device, dtype, scope, _, batch, channels, _, blocks = merging
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    weights = noise((12 if scope == "block" else 4) * channels, channels) / channels**0.5
    run = _part(merging, weights)
    step = torch.zeros((), dtype=torch.int64, device=device)
    n = side * side
    config = ToMeConfig(ratio=ratio, planner="tiled")
    x = noise(batch, n, channels)
    change = run(x)
    make_plan = partial(PLANNERS["tiled"], x, (1, side, side), config.removed_of(n), config, step)
    plan = make_plan()
    merged = plan.merge(x)

    def ends_of_stack(plan: Plan) -> Tensor:
        """Merge before the first block; unmerge after the last one, with the correction."""
        result = plan.merge(x)  # of blocks that do nothing
        base = x + change
        return base + plan.unmerge(result - plan.merge(base)) - x

    def one(plan: Plan) -> Tensor:
        """Run one block or layer that merges by itself."""
        result = plan.unmerge(run(plan.merge(x), plan.sizes))
        return result + (change - plan.unmerge(plan.merge(change)))

    dense = blocks * _seconds(partial(run, x), device)
    if merging.in_stack:
        spent = _seconds(lambda: ends_of_stack(make_plan()), device)
        spent += blocks * _seconds(partial(run, merged, plan.sizes), device)
    else:
        spent = _seconds(lambda: one(make_plan()), device)  # the first one, which plans for all
        if blocks > 1:
            spent += (blocks - 1) * _seconds(partial(one, plan), device)
    # The ratio is what merging saves of products with weights. In attention, both queries and keys are fewer.
    of_weights = len(weights)
    of_pairs = 2 * n
    saved = (of_weights * ratio + of_pairs * (1 - (1 - ratio) ** 2)) / (of_weights + of_pairs)
    return spent <= dense * (1 - _LEAST_SAVED * saved)


def _part(merging: TimedMerging, weights: Tensor) -> Callable[..., Tensor]:
    """Make self-attention, or a block. It is called with tokens, and with sizes if they merged.

    The weights ``[rows, channels]`` are those of queries, keys, values and output, and then of the MLP, if
    there is one.
    """
    channels = merging.channels
    project, out, mlp = weights.tensor_split((3 * channels, 4 * channels))

    def attend(x: Tensor, sizes: Tensor | None = None) -> Tensor:
        q, k, v = F.linear(x, project).unflatten(-1, (3, merging.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.linear(_attention(merging, q, k, v, sizes).transpose(1, 2).flatten(2), out)

    if merging.scope == "layers":
        return attend
    up = mlp[: 4 * channels]
    down = mlp[4 * channels :].view(channels, 4 * channels)

    def block(x: Tensor, sizes: Tensor | None = None) -> Tensor:
        x = x + attend(F.layer_norm(x, x.shape[-1:]), sizes)
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), up)), down)

    return block


def _attention(merging: TimedMerging, q: Tensor, k: Tensor, v: Tensor, sizes: Tensor | None) -> Tensor:
    if sizes is None:
        return F.scaled_dot_product_attention(q, k, v)
    way = merging.bias(k.shape[2])
    if way is not Bias.MASK:
        return attend_without_mask(way, F.scaled_dot_product_attention, q, k, v, sizes)
    mask = once(sizes, k.dtype, lambda: sizes.log().to(k.dtype))  # for all blocks
    return F.scaled_dot_product_attention(q, k, v, mask[:, None, None])


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call: the shortest mean of several rounds, which has the least noise.

    A round is as many calls as fit in a short time, and then one wait for the device, as in a generation.
    Long calls have fewer rounds.
    """

    def mean_of(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / calls

    mean_of(1)  # for warm-up
    took = mean_of(1)
    calls = max(1, int(_ROUND / took))
    rounds = max(1, min(_ROUNDS, int(_MOST_SECONDS / (calls * took))))
    return min(mean_of(calls) for _ in range(rounds))


def _key(merging: TimedMerging, ratio: float) -> str:
    """Return all that a measurement depends on, as text."""
    device, dtype, scope, _, batch, channels, heads, blocks = merging
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    removed_of = MergeSettings(ratio=ratio).removed_of
    sizes = dict.fromkeys(merging.bias(side**2 - removed_of(side**2)).value for side in SIDES)
    return (
        f"{device.type} {name}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}, "
        f"batch {batch}, {heads} × {channels // heads} channels, {blocks} blocks a plan, scope {scope}, "
        f"sizes by {' and '.join(sizes)}, corrected, ratio {ratio:g}, "
        f"sides {' '.join(map(str, SIDES))}, {_LEAST_SAVED:g} saved"
    )


def _read(file: Path) -> dict[str, tuple[int, int]]:
    """Return the numbers of tokens in a cache file and the times of measuring, or none if it is damaged."""
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


def _write(file: Path, found: dict[str, tuple[int, int]]) -> None:
    """Add measurements to a cache file, which is never half written and loses none of other processes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(file.parent):
        number, name = tempfile.mkstemp(dir=file.parent)
        os.close(number)
        part = Path(name)
        try:
            part.write_text(json.dumps({**_read(file), **found}, indent=2), encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others from writing to a folder within the context.

    Raises:
        OSError: another process does not stop writing.
    """
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
