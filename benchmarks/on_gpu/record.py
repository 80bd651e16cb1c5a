"""The record of a run: one line of JSON for each measurement, and what a later run finds there."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tokenmerge_tools.machine import source_commit

Facts: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str, int | None]  # part, name and round of a measurement

# After these errors the device answers no other call.
LOST = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
# What a later run need not measure again. What did not fit in the time is missing.
FINAL = ("ok", "absent", "error")
_MACHINE = "machine"


def lines_of(record: Path) -> list[Facts]:
    """Return the lines of a record. A run that is killed may leave the last one unfinished."""
    if not record.exists():
        return []
    text = record.read_text(encoding="utf-8")
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line]


def machine_of(options: argparse.Namespace) -> Facts:
    """Return what has to be the same in all runs of a record."""
    device = torch.device(options.device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"card": card, "tiny": options.tiny, "torch": torch.__version__, "commit": source_commit()}


class Run:
    """The options of a run, its record, and the time that is left.

    A record that exists is continued: what it has is not measured again.

    Attributes:
        device: that is measured.
        on_gpu: whether it is a GPU with CUDA's events and graphs.
        tiny: whether models are small and everything runs at most twice.
        half: the dtype of most models.
        bfloat16: the dtype of the others.
        folder: where the record and the images are.
        variants: the names of the variants that are timed in turns, or an empty sequence for all.
        part: name of the running part.
    """

    def __init__(self, options: argparse.Namespace, began: float) -> None:
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.tiny = options.tiny
        self.half = torch.float32 if self.device.type == "cpu" else torch.float16
        self.bfloat16 = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.folder = options.out.parent
        self.variants = options.variants
        self.folder.mkdir(parents=True, exist_ok=True)
        self.part = ""
        self.statuses = Counter[str]()
        self._record = options.out
        self._began = began
        self._ends = began + options.limit
        self._part_ends = self._ends
        self._left_out = 0
        before = lines_of(self._record)
        self._continue(before, machine_of(options))
        final = [line for line in before if line["status"] in FINAL]
        if options.retry:
            final = [line for line in final if line["status"] != "error"]
        self._known: dict[Key, Facts] = {
            (line["part"], line["name"], line.get("round")): line for line in final
        }
        ends = [line for line in before if line["name"] == "end" and not options.retry]
        self._complete = {line["part"] for line in ends if line["complete"]}

    def _continue(self, before: Sequence[Facts], machine: Facts) -> None:
        """Check that the record is of this machine, and cut off a line that was not finished."""
        for line in before:
            if line["name"] != _MACHINE:
                continue
            then = {name: line.get(name) for name in machine}
            if other := {name: (own, machine[name]) for name, own in then.items() if own != machine[name]}:
                differences = ", ".join(f"{name} {own}, and not {now}" for name, (own, now) in other.items())
                raise SystemExit(f"{self._record} is the record of {differences}; give another --out")
        if before and not any(line["name"] == _MACHINE for line in before):
            raise SystemExit(f"{self._record} is the record of an earlier script; give another --out")
        if self._record.exists():
            content = self._record.read_bytes()
            os.truncate(self._record, content.rfind(b"\n") + 1)
        self.part = "run"
        self.write(_MACHINE, "done", **machine)

    def has(self, part: str) -> bool:
        """Return whether the record has all of a part."""
        return part in self._complete

    def begin(self, part: str, budget: float) -> None:
        """Begin a part, which has this many seconds."""
        self.part = part
        self._part_ends = min(self._ends, time.monotonic() + budget)
        self._left_out = 0

    def end(self, seconds: float, failed: bool) -> None:
        """Note that the running part has ended, and whether a later run has to come back to it."""
        complete = not (failed or self._left_out or self.variants)
        self.write("end", "done", seconds=round(seconds, 1), complete=complete)

    @property
    def left(self) -> float:
        """The seconds that the running part has left. A tiny run has no budgets."""
        return float("inf") if self.tiny else self._part_ends - time.monotonic()

    def known(self, name: str, turn: int | None = None) -> Facts | None:
        """Return the line that the record has of a measurement of the running part."""
        return self._known.get((self.part, name, turn))

    def measure(
        self,
        name: str,
        measurement: Callable[[], Facts],
        needs: float = 1.0,
        again: bool = False,
        turn: int | None = None,
    ) -> Facts | None:
        """Record one measurement, and return it. One that the record has is only measured ``again`` if asked.

        The result is None if the measurement failed, or if the part has fewer seconds left than it needs.
        """
        before = self.known(name, turn)
        if before is not None and not again:
            return before if before["status"] == "ok" else None
        if self.left < needs:
            self._left_out += 1
            self.write(name, "left out", needs=round(needs, 2))
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
        """Append a line to the record, which is then on the disk."""
        self.statuses[status] += 1
        now = round(time.monotonic() - self._began, 1)
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
