"""Tables of records: the speed-ups, what is wanted beside what was measured, and the page of the docs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from on_gpu.record import Facts, lines_of

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
ABOUT_OTHERS = [
    "A *shared plan* compares tokens once for neighbouring blocks, and *whole blocks* also merges",
    "around MLPs. DeepCache's number is its interval of full steps.",
]


class Wanted(NamedTuple):
    """What a run on a GPU has to show of a variant of a measurement, as a speed-up."""

    what: str
    measurement: str
    variant: str
    speedup: float


WANTED = (
    Wanted("SD 1.5, 1024 px, `ratio=0.5`", "sd15 1024, batch 1, one step", "ratio 0.5", 1.20),
    Wanted("SD 1.5, 768 px, batch 8, `ratio=0.5`", "sd15 768, batch 8, one step", "ratio 0.5", 1.08),
    Wanted("FLUX.1, 1024 px, a stack at 0.5", "flux 1024, one step", "stack 0.5", 1.6),
    Wanted("Wan 2.1, 480p, a stack at 0.5", "wan 480, one step", "stack 0.5", 2.3),
)
# Nothing that a user asks for may be slower. A bias that is tried by itself may.
SLOWEST = 0.98
OURS = ("ratio 0.5", "apply_patch", "stack 0.5", "stack 0.3", "speed-up 2", "speed-up 3", "speed-up 1.5")


class Measured(NamedTuple):
    """The medians over the rounds of one variant.

    Attributes:
        ms: the median time.
        least: the shortest time of a round.
        most: the longest.
        speedups: over the fastest dense variant of the same round. It is empty where none was measured.
        gb: the peak of memory in the round in which it was lowest: others were still being freed.
        more_gb: how much higher the peak is than that of the dense model in the same round; in the last
            record alone, since the code of the others took more.
    """

    ms: float
    least: float
    most: float
    speedups: Sequence[float]
    gb: float
    more_gb: float

    @property
    def speedup(self) -> float:
        """Return the median of the speed-ups."""
        return statistics.median(self.speedups) if self.speedups else float("nan")

    def __str__(self) -> str:
        """Return the speed-up, with the lowest and the highest where they differ by more than a tenth."""
        least = min(self.speedups)
        most = max(self.speedups)
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
        for line in lines_of(record):
            if line["status"] == "ok" and line.get("round") and "ms" in line:
                name = line["name"].removesuffix(f": {line['variant']}")
                own = rounds.setdefault(name, {}).setdefault(line["variant"], {})
                own[record, line["round"]] = line
    found: dict[str, Row] = {}
    for name, variants in rounds.items():
        dense = [own for variant, own in variants.items() if variant.startswith("dense")]
        for variant, own in variants.items():
            beside = {turn: [one[turn] for one in dense if turn in one] for turn in own}
            last, _ = list(own)[-1]
            ratios = []
            more = []
            for turn, lines in beside.items():
                if lines:
                    ratios.append(min(one["ms"] for one in lines) / own[turn]["ms"])
                    if turn[0] == last:
                        more.append(_gb(own[turn]) - _gb(lines[0]))
            times = [line["ms"] for line in own.values()]
            found.setdefault(name, {})[variant] = Measured(
                statistics.median(times),
                min(times),
                max(times),
                ratios,
                min(map(_gb, own.values())),
                statistics.median(more) if more else float("nan"),
            )
    return found


def _gb(line: Facts) -> float:
    return float(line.get("peak_mib", float("nan")) * 2**20 / 1e9)


def table(record: Path) -> str:
    """Return the times of a record with their spread, the speed-ups and the peak of memory, as Markdown."""
    rows = ["| measurement | variant | ms | least | most | speed-up | memory |", "|---|---|" + "---:|" * 5]
    for name, variants in speedups(record).items():
        for variant, own in variants.items():
            times = f"{own.ms:.1f} | {own.least:.1f} | {own.most:.1f}"
            memory = "" if math.isnan(own.gb) else f"{own.gb:.2f} GB"
            rows.append(f"| {name} | {variant} | {times} | {own.speedup:.2f} | {memory} |")
    return "\n".join(rows)


def acceptance(record: Path) -> str:
    """Return what is wanted beside what was measured, as Markdown."""
    found = speedups(record)
    rows = ["| | wanted | measured | kept |", "|---|---:|---:|---|"]
    for what, measurement, variant, least in WANTED:
        own = found.get(measurement, {}).get(variant)
        measured = math.nan if own is None else own.speedup
        rows.append(f"| {what} | {least:.2f}× | {_shown(measured)} | {_kept(measured, least)} |")
    ours: dict[str, float] = {}
    for name, variants in found.items():
        for variant, own in variants.items():
            if variant in OURS and own.speedups:
                ours[f"{variant}, {name}"] = own.speedup
    slowest = min(ours, key=ours.__getitem__, default="")
    measured = ours.get(slowest, math.nan)
    shown = f"{_shown(measured)} ({slowest})" if slowest else _shown(measured)
    rows.append(f"| the slowest of ours | {SLOWEST:.2f}× | {shown} | {_kept(measured, SLOWEST)} |")
    too_slow = [f"- {name}: {speedup:.2f}×" for name, speedup in ours.items() if speedup < SLOWEST]
    if too_slow:
        rows += ["", f"Below {SLOWEST:.2f}× are:", "", *too_slow]
    return "\n".join(rows)


def _shown(speedup: float) -> str:
    return "not measured" if math.isnan(speedup) else f"{speedup:.2f}×"


def _kept(speedup: float, least: float) -> str:
    if math.isnan(speedup):
        return ""
    return "yes" if speedup >= least else "no"


def page_tables(cards: Mapping[str, Sequence[Path]]) -> str:
    """Return the speed-ups of whole generations on each card, for the documentation."""
    found = {card: speedups(*records) for card, records in cards.items()}
    parts = []
    for card, own in found.items():
        head = [f"| {card} | dense | {' | '.join(ASKED)} | memory | extra memory at `2` |"]
        parts.append([*head, "|---|" + "---:|" * (len(ASKED) + 3), *_rows(own, _asked)])
    # In newer records merging alone is timed in single steps, so that there is none of what follows.
    others: dict[str, dict[str, Row]] = {}
    for card, own in found.items():
        images = {key: row for key, row in own.items() if key.endswith("generation") and "ratio 0.5" in row}
        if images:
            others[card] = images
    if others:
        parts += [["## Other packages, and merging alone"], ABOUT_OTHERS]
    for card, images in others.items():
        head = [f"| {card} | {' | '.join(OTHERS)} |", "|---|" + "---:|" * len(OTHERS)]
        parts.append([*head, *_rows(images, _others)])
    return "\n\n".join("\n".join(part) for part in parts)


def _rows(found: dict[str, Row], cells: Callable[[Row], Sequence[str]]) -> Iterator[str]:
    for key, shown in GENERATIONS.items():
        row = found.get(f"{key}, generation")
        if row:
            yield f"| {shown} | {' | '.join(cells(row))} |"


def _asked(row: Row) -> Sequence[str]:
    dense = row["dense"]
    more = row["speed-up 2"].more_gb
    asked = (str(row[name]) if name in row else "" for name in ASKED.values())
    return [f"{dense.ms / 1000:.2f} s", *asked, f"{dense.gb:.1f} GB", f"{1000 * more:.0f} MB"]


def _others(row: Row) -> Sequence[str]:
    return [f"{row[name].speedup:.1f}×" if name in row else "" for name in OTHERS.values()]
