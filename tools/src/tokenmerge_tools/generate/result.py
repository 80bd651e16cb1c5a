"""The results of ``tokenmerge generate``, as objects and as the JSON of ``run.json``."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from tokenmerge.config import ToMeConfig
from tokenmerge.report import Report, RunSteps
from tokenmerge_tools.files import write_json
from tokenmerge_tools.timing import Measurement, Times


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """Wall-clock seconds of each timed pipeline call of one variant, in order, and the peak memory."""

    name: str
    seconds: tuple[float, ...]
    peak_bytes: int | None

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


@dataclasses.dataclass
class Result:
    """The results of a run so far. Dense comes first among the names of the variants, if it runs.

    ``quality`` is None without a dense run or without torchmetrics, and ``steps`` if they were not recorded.
    ``config`` has the settings, and ``summary`` is the text of the patch after the run.
    """

    folder: Path
    conditions: dict[str, Any]
    batch: int
    names: tuple[str, ...]
    report: Report
    config: ToMeConfig
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    quality: Quality | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    complete: bool = False
    summary: str = ""
    steps: RunSteps | None = None

    @property
    def variants(self) -> list[VariantResult]:
        """The measurements of each variant."""
        found = []
        for name in self.names:
            own = [one for one in self.measurements if one.variant == name]
            peak = max((one.peak_bytes for one in own if one.peak_bytes is not None), default=None)
            found.append(VariantResult(name, tuple(one.seconds for one in own), peak))
        return found

    def speedup(self, variant: VariantResult) -> float | None:
        """Return the median time of dense over that of ``variant``; None if either was not timed."""
        dense = self.variants[0]
        if dense.name != "dense" or not dense.seconds or not variant.seconds:
            return None
        return dense.per_image(self.batch).median / variant.per_image(self.batch).median

    def write(self) -> None:
        """Write ``run.json``."""
        write_json(self.folder / "run.json", self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``run.json``. An infinite PSNR becomes the string ``"inf"``."""
        variants = {}
        for one in self.variants:
            per_image = dataclasses.asdict(one.per_image(self.batch)) if one.seconds else None
            variants[one.name] = {
                "seconds_per_call": list(one.seconds),
                "seconds_per_image": per_image,
                "speedup": self.speedup(one),
                "peak_memory_bytes": one.peak_bytes,
            }
        quality = None
        if self.quality is not None:
            psnr = [value if math.isfinite(value) else str(value) for value in self.quality.psnr]
            quality = {"psnr_db": psnr, "ssim": list(self.quality.ssim)}
        return {
            "complete": self.complete,
            "conditions": self.conditions,
            "variants": variants,
            "quality": quality,
            "report": self.report.to_dict(),
            "notes": self.notes,
            "summary": self.summary,
            **({} if self.steps is None else {"steps": self.steps.to_dicts()}),
        }
