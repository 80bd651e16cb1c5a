"""The results of ``tokenmerge generate``, as objects and as the JSON of ``run.json``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenmerge.report import Report, RunSteps
from tokenmerge_tools.timing import Measurement, Times


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """Timings of one variant.

    ``seconds`` has the wall-clock time of each timed pipeline call, in the order in which they ran.
    """

    name: str
    seconds: tuple[float, ...]
    peak_bytes: int | None

    @classmethod
    def of(cls, name: str, measurements: Iterable[Measurement]) -> VariantResult:
        """Collect the measurements of one variant."""
        own = [measurement for measurement in measurements if measurement.variant == name]
        peaks = [measurement.peak_bytes for measurement in own if measurement.peak_bytes is not None]
        return cls(name, tuple(measurement.seconds for measurement in own), max(peaks, default=None))

    def per_image(self, batch: int) -> Times:
        """Return the seconds per picture, which are the seconds per call divided by the batch."""
        return Times.of([seconds / batch for seconds in self.seconds])


@dataclasses.dataclass(frozen=True)
class Quality:
    """Closeness of each merged picture to the dense one with the same seed, measured on 8-bit pictures.

    The PSNR is in dB, and infinite for equal pictures.
    """

    psnr: tuple[float, ...]
    ssim: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """All results of a run.

    ``conditions`` are machine, versions and options, in JSON-compatible values. Dense comes first among the
    variants, if it ran. ``quality`` is None without a dense run or without torchmetrics. ``steps`` is the
    record of the merged steps, None if they were not recorded.
    """

    folder: Path
    conditions: dict[str, Any]
    batch: int
    variants: tuple[VariantResult, ...]
    quality: Quality | None
    report: Report
    notes: tuple[str, ...]
    complete: bool
    steps: RunSteps | None = None

    def speedup(self, variant: VariantResult) -> float | None:
        """Return the median time of dense over that of ``variant``; None if either was not timed."""
        dense = self.variants[0]
        if dense.name != "dense" or not dense.seconds or not variant.seconds:
            return None
        return dense.per_image(self.batch).median / variant.per_image(self.batch).median

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``run.json``. An infinite PSNR becomes the string ``"inf"``."""
        return {
            "complete": self.complete,
            "conditions": self.conditions,
            "variants": {
                variant.name: {
                    "seconds_per_call": list(variant.seconds),
                    "seconds_per_image": dataclasses.asdict(variant.per_image(self.batch))
                    if variant.seconds
                    else None,
                    "speedup": self.speedup(variant),
                    "peak_memory_bytes": variant.peak_bytes,
                }
                for variant in self.variants
            },
            "quality": None
            if self.quality is None
            else {
                "psnr_db": [_json_number(value) for value in self.quality.psnr],
                "ssim": list(self.quality.ssim),
            },
            "report": self.report.to_dict(),
            "notes": list(self.notes),
            **({} if self.steps is None else {"steps": self.steps.to_dicts()}),
        }


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
