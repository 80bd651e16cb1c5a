"""Published measurements to compare ours with."""

from __future__ import annotations

import csv
import dataclasses
from importlib import resources

# Method in the published tables → (whether it merges, name of its attention here).
_METHODS = {
    "baseline": (False, "default"),
    "vanilla": (False, "default"),
    "tome": (True, "default"),
    "tome+xformers": (True, "xformers"),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """One measurement in a published table. A value that was not published is None.

    Times are in seconds per call and per image, memory in GB per image, the resolution is the width and
    height in pixels. ``note`` has the conditions in the table's words.
    """

    source: str
    merges: bool
    attention: str
    ratio: float
    device: str
    resolution: int
    batch: int | None
    seconds: float | None
    seconds_per_image: float | None
    memory: float | None
    fid: float | None
    out_of_memory: bool
    note: str


def published_rows() -> list[Published]:
    """Read all published measurements, in the order of the tables.

    >>> published_rows()[0].seconds_per_image
    3.09
    """
    text = (resources.files("tokenmerge_tools.reporting") / "published.csv").read_text(encoding="utf-8")
    rows = []
    for values in csv.DictReader(text.splitlines()):
        merges, attention = _METHODS[values["method"]]
        rows.append(
            Published(
                source=values["source"],
                merges=merges,
                attention=attention,
                ratio=float(values["ratio"]),
                device=values["gpu"],
                resolution=int(values["resolution"]),
                batch=int(values["batch"]) if values["batch"] else None,
                seconds=_number(values["seconds"]),
                seconds_per_image=_number(values["seconds_per_image"]),
                memory=_number(values["memory_gb_per_image"]),
                fid=_number(values["fid"]),
                out_of_memory=values["seconds"] == "OOM",
                note=values["note"],
            )
        )
    return rows


def _number(text: str) -> float | None:
    return float(text) if text and text != "OOM" else None
