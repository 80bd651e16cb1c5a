"""Finds devices, dtypes, schedulers, attention implementations and sizes by the names that users give."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge.config.checks import number, one_of, optional
from tokenmerge.errors import ConfigError, reason_of, short_repr

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

ATTENTION_CHOICES = ("sdpa", "xformers", "default")
ATTENTION_HELP = f"{', '.join(ATTENTION_CHOICES)}, or a back-end of diffusers, such as flash or sage."
DTYPE_CHOICES = ("auto", "fp32", "fp16", "bf16")
SCHEDULER_NAMES = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "deis": "DEISMultistepScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-a": "EulerAncestralDiscreteScheduler",
    "flow-euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "lcm": "LCMScheduler",
    "lms": "LMSDiscreteScheduler",
    "plms": "PNDMScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
}

check_guidance = optional(number("a number ≥ 0", lambda scale: scale >= 0))

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The settings that the name of a scheduler implies. Without them, the config of the model's own scheduler
# could make it another method.
_SCHEDULER_SETTINGS: dict[str, dict[str, Any]] = {
    "DPMSolverMultistepScheduler": {"algorithm_type": "dpmsolver++"},
    "PNDMScheduler": {"skip_prk_steps": True},
}


def resolve_device(name: str) -> torch.device:
    """Turn ``"auto"`` or a torch device name into an existing device."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device: cannot use {name!r} ({reason_of(error)}); use auto, or a device that "
            "`tokenmerge env` lists"
        ) from error
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a name of :data:`DTYPE_CHOICES` into a dtype; ``"auto"`` is fp16 on CUDA and fp32 elsewhere."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    one_of(DTYPE_CHOICES)("dtype", name)
    if name == "fp16" and device.type == "cpu":
        raise ConfigError("dtype: fp16 is slow and partly unsupported on a CPU; use bf16 or fp32")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in :data:`DTYPE_CHOICES`.

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    return next(name for name, candidate in _DTYPES.items() if candidate == dtype)


def scheduler_class_name(name: str) -> str:
    """Turn a short name of :data:`SCHEDULER_NAMES` or a diffusers class name into the class name.

    >>> scheduler_class_name("dpm++")
    'DPMSolverMultistepScheduler'
    """
    import diffusers

    class_name = SCHEDULER_NAMES.get(name.lower(), name)
    found = getattr(diffusers, class_name, None) if class_name.endswith("Scheduler") else None
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise ConfigError(
            f"scheduler: {name!r} is unknown; use one of {', '.join(SCHEDULER_NAMES)}, or the class name of "
            "a diffusers scheduler such as KDPM2DiscreteScheduler"
        )
    return class_name


def set_scheduler(pipe: DiffusionPipeline, name: str) -> None:
    """Replace the scheduler of a pipeline by another one with the same config."""
    import diffusers

    wanted: type[SchedulerMixin] = getattr(diffusers, scheduler_class_name(name))
    present = pipe.scheduler
    compatible = sorted(scheduler.__name__ for scheduler in present.compatibles)
    if "beta_schedule" in inspect.signature(wanted.__init__).parameters:
        fits = "beta_schedule" in present.config
    else:  # flow matching and other schedulers with their own noise schedule
        fits = wanted.__name__ in compatible
    if not fits:
        raise ConfigError(
            f"scheduler: {wanted.__name__} does not fit a model made for {type(present).__name__}; "
            f"use one of {', '.join(compatible)}"
        )
    settings = dict(_SCHEDULER_SETTINGS.get(wanted.__name__, {}))
    clips = inspect.signature(wanted.__init__).parameters.get("clip_sample")
    # Some schedulers clip the model's prediction to the range of images by default. Latents have another
    # range.
    if clips is not None and "clip_sample" not in present.config and getattr(pipe, "vae", None) is not None:
        settings["clip_sample"] = False
    pipe.scheduler = wanted.from_config(present.config, **settings)


def attention_choice(field: str, name: Any) -> str:
    """Accept one of :data:`ATTENTION_CHOICES`, or the name of a back-end of diffusers."""
    if isinstance(name, str) and name in ATTENTION_CHOICES:
        return name
    from diffusers.models import AttentionBackendName

    backends = tuple(backend.value for backend in AttentionBackendName)
    return str(one_of((*ATTENTION_CHOICES, *dict.fromkeys(backends)))(field, name))


def check_attention(name: str) -> None:
    """Raise a ConfigError unless ``name`` is an attention implementation that is installed."""
    attention_choice("attention", name)
    if name == "xformers" and importlib.util.find_spec("xformers") is None:
        raise ConfigError("attention: xformers is not installed; run: pip install xformers, or use sdpa")
    if name not in ATTENTION_CHOICES:
        from diffusers.models import attention_backend

        try:
            with attention_backend(name):  # checks that its package is installed
                pass
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"attention: cannot use {name!r} ({reason_of(error)}); install what it needs, or use sdpa"
            ) from error


def set_attention(models: Sequence[ModelMixin], name: str) -> None:
    """Set the attention implementation of denoisers and ControlNets in place.

    ``"sdpa"`` is torch's fused attention, the default of diffusers. ``"xformers"`` is the memory-efficient
    attention of xFormers. ``"default"`` is unfused attention, which stores the whole attention matrix.
    ``"flash"``, ``"sage"`` and others are back-ends of diffusers, set for these models only.
    """
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    check_attention(name)
    processors = {"sdpa": AttnProcessor2_0, "default": AttnProcessor}
    for model in models:
        if name == "xformers":
            model.enable_xformers_memory_efficient_attention()
            continue
        if name not in processors:
            _set_backend(model, name)
            continue
        plain = {key: type(processor) for key, processor in model.attn_processors.items()}
        if set(plain.values()) <= {AttnProcessor, AttnProcessor2_0}:
            model.set_attn_processor({key: processors[name]() for key in plain})
        elif name != "sdpa":
            kinds = ", ".join(sorted({kind.__name__ for kind in plain.values()}))
            raise ConfigError(
                f"attention: {type(model).__name__} computes attention in {kinds}, which supports only sdpa "
                "and the back-ends of diffusers; use sdpa"
            )
        else:
            for processor in _with_backends(model):
                processor._attention_backend = None


def _set_backend(model: ModelMixin, name: str) -> None:
    """Make a model compute attention with a back-end of diffusers.

    ``model.set_attention_backend`` would also set it for all other models that leave the choice to diffusers.
    """
    from diffusers.models import AttentionBackendName

    processors = _with_backends(model)
    if not processors:
        kinds = ", ".join(sorted({type(processor).__name__ for processor in model.attn_processors.values()}))
        raise ConfigError(
            f"attention: {type(model).__name__} computes attention in {kinds}, which support no back-end "
            f"of diffusers, got {name!r}; use one of {', '.join(ATTENTION_CHOICES)}"
        )
    for processor in processors:
        processor._attention_backend = AttentionBackendName(name)


def _with_backends(model: ModelMixin) -> list[Any]:
    processors = (getattr(module, "processor", None) for module in model.modules())
    return [processor for processor in processors if hasattr(processor, "_attention_backend")]


def parse_size(text: str) -> tuple[int, int]:
    """Read ``WIDTHxHEIGHT``, or one number for a square, into (width, height) in pixels.

    >>> parse_size("768x512"), parse_size("512")
    ((768, 512), (512, 512))
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:[x×X*]\s*(\d{1,9})\s*)?", text)
    if found is None or 0 in (sides := (int(found[1]), int(found[2] or found[1]))):
        raise ConfigError(
            f"size: expected WIDTHxHEIGHT or one number, such as 768x512 or 512, got {short_repr(text)}"
        )
    return sides


def check_size(size: tuple[int, int], scale: int) -> tuple[int, int]:
    """Turn (width, height) in pixels into (width, height) of the latents.

    ``scale`` is the number of pixels per latent position along each side.
    """
    width, height = size
    if width % scale or height % scale:
        nearest = "x".join(str(max(scale, round(side / scale) * scale)) for side in size)
        raise ConfigError(
            f"size: this model needs multiples of {scale} pixels, got {width}x{height}; use {nearest}"
        )
    return width // scale, height // scale
