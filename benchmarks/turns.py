"""Shared by the scripts in this folder: interleaved timing of variants, options and records."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

import tokenmerge

Name = TypeVar("Name", int, str)


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=at_least_2, default=rounds, help=f"timed rounds, 2 or more (default: {rounds})"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--out", type=Path, help="append the times to this file, one JSON line per setting")
    return parser


def at_least_2(text: str) -> int:
    """Read a number of rounds, at least 2, so that quartiles exist."""
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected 2 or more, since quartiles are shown, got {text}")
    return int(text)


def seconds(call: Callable[[], object], device: torch.device | str) -> float:
    """Time a call, including its work on the device."""
    device = torch.device(device)
    start = now(device)
    call()
    return now(device) - start


def now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def in_turns(
    calls: Mapping[Name, Callable[[], float]], rounds: int, what: str, warm_up: bool = True
) -> dict[Name, list[float]]:
    """Run variants in interleaved rounds, so that changes in the machine's speed affect all of them alike.

    Args:
        calls: name of a variant → a function that runs it and returns the seconds that it took.
        rounds: number of rounds.
        what: name of the measurement, for the lines that show the progress.
        warm_up: whether an untimed round comes first.
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(0 if warm_up else 1, rounds + 1):
        for name, call in calls.items():
            took = call()
            print(f"{what}: round {turn} of {rounds}: {name} {took:.3f} s", file=sys.stderr, flush=True)
            if turn:
                times[name].append(took)
    return times


def record(options: argparse.Namespace, times: Mapping[Name, list[float]], **conditions: Any) -> None:
    """Append the times with their conditions to the file in the options, if one is given."""
    if options.out is None:
        return
    shared = {
        "device": options.device,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tokenmerge": tokenmerge.__version__,
    }
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**conditions, **shared, "seconds": times}) + "\n")
