"""What the scripts in this folder share: timing variants in turns, their options, their records."""

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
    """Options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=at_least_2, default=rounds, help=f"timed rounds, 2 or more (default: {rounds})"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--out", type=Path, help="append the times to this file, a JSON line a setting")
    return parser


def at_least_2(text: str) -> int:
    """Read a number that a spread can be made of."""
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected 2 or more, to tell their spread, got {text}")
    return int(text)


def seconds(call: Callable[[], object], device: torch.device | str) -> float:
    """Time a call, the device's work included."""
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
    """Let variants take turns, so that a machine that becomes slower or faster does so for all of them.

    Args:
        calls: by the variants' names; each tells the seconds that it took.
        rounds: to time.
        what: is measured, for the lines that show how far it is.
        warm_up: whether a round goes before them that does not count.
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
    """Append the times with their conditions to the file that the options name, if they name one."""
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
