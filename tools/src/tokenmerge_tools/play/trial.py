"""One trial of the playground: settings, both pictures and measurements."""

from __future__ import annotations

import dataclasses
import math

from PIL.Image import Image

from tokenmerge_tools.pipelines.options import GenerateOptions


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One picture drawn dense and merged.

    Args:
        options: the options; the size is the one that was drawn.
        dense: the picture without merging.
        merged: the picture with merging, from the same seed.
        groups: the merged picture with the groups of merged tokens drawn over it.
        groups_text: description of these groups.
        dense_seconds: wall-clock time of the dense pipeline call.
        merged_seconds: wall-clock time of the merged pipeline call.
        psnr: closeness of merged to dense in dB; infinite if they are identical.
        summary: what merged and what that saves, in several lines.
        notes: notes of the report, one sentence each.
        warnings: warnings given while the merged picture was drawn.
    """

    options: GenerateOptions
    dense: Image
    merged: Image
    groups: Image
    groups_text: str
    dense_seconds: float
    merged_seconds: float
    psnr: float
    summary: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """Time of dense over time of merged."""
        return self.dense_seconds / self.merged_seconds

    @property
    def identical(self) -> bool:
        """Whether both pictures are equal in every pixel."""
        return math.isinf(self.psnr)
