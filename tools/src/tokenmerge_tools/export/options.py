"""The options of ``tokenmerge export``, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tokenmerge.config.checks import integer, one_of
from tokenmerge_tools.export.formats import FORMATS
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL
from tokenmerge_tools.pipelines.settings import check_guidance


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to export.

    Args:
        out: folder for the files; it must not exist yet, or be empty.
        to: ``"onnx"`` or ``"openvino"``.
        model: a bundled model, a diffusers folder, a ``.safetensors`` checkpoint or a hub id.
        merging: the method and its settings, which must be the same at every denoising step.
        size: (width, height) in pixels. None: the model's default.
        batch: pictures per call, ≥ 1.
        guidance: scale of classifier-free guidance, ≥ 0. Above 1, most pipelines double the batch. None: the
            pipeline's default.

    Raises:
        ConfigError: a value is outside these ranges.
    """

    out: Path
    to: str = "onnx"
    model: str = DEFAULT_MODEL
    merging: MethodSpec = dataclasses.field(default_factory=MethodSpec)
    size: tuple[int, int] | None = None
    batch: int = 1
    guidance: float | None = None

    def __post_init__(self) -> None:
        one_of(tuple(FORMATS))("to", self.to)
        integer(1)("batch", self.batch)
        check_guidance("guidance", self.guidance)
