"""The options of ``tokenmerge generate``, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tokenmerge.config.checks import integer, one_of
from tokenmerge.errors import ConfigError
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL
from tokenmerge_tools.pipelines.settings import DTYPE_CHOICES, check_attention, check_guidance


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of one run.

    Args:
        prompt: text of the picture, not empty.
        model: a bundled model, a diffusers folder, a ``.safetensors`` checkpoint or a hub id.
        merging: the method and its settings.
        size: (width, height) in pixels. None: the model's default.
        steps: denoising steps, ≥ 1.
        seed: seed of the first picture, ≥ 0. Picture i has the seed ``seed + i``, whatever the batch.
        batch: pictures per call, ≥ 1.
        scheduler: short name or diffusers class name. None: the model's default.
        negative_prompt: what the picture should not show.
        guidance: scale of classifier-free guidance, ≥ 0. None: the pipeline's default.
        dtype: ``"auto"``, ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        device: ``"auto"`` or a torch device name.
        compile: compile the denoiser with ``torch.compile``, in the untimed warm-up.
        attention: ``"sdpa"``, ``"xformers"``, ``"default"``, or a back-end of diffusers, such as ``"flash"``.
        control: picture for the ControlNet, resized to ``size``. It needs ``controlnet``.
        controlnet: folder or hub id of a ControlNet. It needs ``control``.
        out: folder for the results. None: a new folder in ``outputs/``, named after the prompt.
        compare: whether to run dense too.
        repeat: timed calls per variant, ≥ 1.
        record_steps: whether to record what each merged step does, in the untimed call.
    """

    prompt: str
    model: str = DEFAULT_MODEL
    merging: MethodSpec = dataclasses.field(default_factory=MethodSpec)
    size: tuple[int, int] | None = None
    steps: int = 25
    seed: int = 0
    batch: int = 1
    scheduler: str | None = None
    negative_prompt: str | None = None
    guidance: float | None = None
    dtype: str = "auto"
    device: str = "auto"
    compile: bool = False
    attention: str = "sdpa"
    control: Path | None = None
    controlnet: str | None = None
    out: Path | None = None
    compare: bool = True
    repeat: int = 3
    record_steps: bool = False

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ConfigError('prompt: it is empty; say what to draw, such as "a red apple"')
        for name, lowest in (("steps", 1), ("batch", 1), ("repeat", 1), ("seed", 0)):
            integer(lowest)(name, getattr(self, name))
        check_guidance("guidance", self.guidance)
        one_of(DTYPE_CHOICES)("dtype", self.dtype)
        if (self.control is None) != (self.controlnet is None):
            given, missing = (
                ("control", "controlnet") if self.controlnet is None else ("controlnet", "control")
            )
            raise ConfigError(f"{given}: it needs {missing} too: a picture and the ControlNet that reads it")
        check_attention(self.attention)
        if self.record_steps and self.compile:
            raise ConfigError(
                "record-steps: a model that is compiled into one graph records no steps; leave --compile out"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the options in JSON-compatible values."""
        paths = {name: str(value) if (value := getattr(self, name)) else None for name in ("control", "out")}
        return {**dataclasses.asdict(self), "merging": self.merging.to_dict(), **paths}
