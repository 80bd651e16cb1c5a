"""Times of calls on the device, and variants that are timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from on_gpu.record import Facts, Run

TINY_ROUNDS = 2


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


def medians(run: Run, call: Callable[[], object], seconds: float = 0.1) -> Facts:
    """Return the median times of a short call, and on a GPU that of a CUDA graph of it."""
    for _ in range(1 if run.tiny else 3):
        call()
    ends = time.monotonic() + seconds
    rows: list[Facts] = []
    while len(rows) < TINY_ROUNDS or (not run.tiny and time.monotonic() < ends):
        rows.append(times_of(run, call))
    found = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    if run.on_gpu:
        try:
            found["graph_ms"] = time_of_graph(run, call)
        except Exception as error:
            found["graph_error"] = f"{type(error).__name__}: {error}"[:200]
    return {**found, "calls": len(rows)}


def time_of_graph(run: Run, call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call without the time for launching its kernels."""
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        kept.append(call())
    return round(statistics.median(times_of(run, graph.replay)["ms"] for _ in range(10)), 4)


def peak_mib(run: Run) -> Facts:
    """Return the peak of memory since it was last reset."""
    return {"peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)} if run.on_gpu else {}


def reset_peak(run: Run) -> None:
    """Forget the peak of memory."""
    if run.on_gpu:
        torch.cuda.reset_peak_memory_stats()


def in_turns(
    run: Run,
    name: str,
    variants: Mapping[str, Callable[[int], Facts]],
    rounds: int,
    warm_up: bool = False,
    **about: Any,
) -> None:
    """Measure variants in interleaved rounds, each round of each variant in a line.

    Each variant is a function of the number of the round, from 1. Round 0 is the ``warm_up``, if there is
    one. A round that the record has whole is not measured again. A round that lacks a variant is, so that all
    of its variants run side by side. A variant needs as long as in the round before.
    """
    rounds = min(rounds, TINY_ROUNDS) if run.tiny else rounds
    chosen = [variant for variant in variants if not run.variants or variant in run.variants]

    def failed(variant: str) -> bool:
        return run.known(f"{name}: {variant}") is not None  # a line without a round

    def is_whole(turn: int) -> bool:
        return all(run.known(f"{name}: {variant}", turn) or failed(variant) for variant in chosen)

    missing = [turn for turn in range(1, rounds + 1) if not is_whole(turn)]
    running = {variant: 0.5 for variant in chosen if not failed(variant)}
    if warm_up and missing:
        missing.insert(0, 0)
    for turn in missing:
        for variant, needs in list(running.items()):

            def measured(variant: str = variant, turn: int = turn) -> Facts:
                return {"variant": variant, "round": turn, **variants[variant](turn), **about}

            began = time.monotonic()
            found = run.measure(f"{name}: {variant}", measured, needs, again=True, turn=turn)
            running[variant] = time.monotonic() - began
            if found is None:
                del running[variant]
