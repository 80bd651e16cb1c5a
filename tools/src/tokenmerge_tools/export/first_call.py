"""The call of a denoiser that is exported: the first one that its pipeline makes."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tokenmerge.errors import ConfigError, reason_of
from tokenmerge.models.base import Host
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.pipelines.call import PipelineCall
from tokenmerge_tools.pipelines.loading import denoiser_of
from tokenmerge_tools.pipelines.options import GenerateOptions

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PROMPT = "a red apple on a table"
_LATER = 0.37  # of the timestep, in the call that is checked


@dataclasses.dataclass(eq=False)
class DenoiserCall:
    """A denoiser with the arguments of one call, by name.

    Token merging treats it as a pipeline, and reads from it whether guidance doubles the batch. Tensors
    become inputs of the exported model; all other values become constants in it. The size is (width, height)
    in pixels, the latent one is (height, width).
    """

    denoiser: nn.Module
    arguments: dict[str, Any]
    size: tuple[int, int]
    latent: tuple[int, int]
    do_classifier_free_guidance: bool = False

    def __post_init__(self) -> None:
        order = inspect.signature(type(self.denoiser).forward).parameters
        self.arguments = {name: self.arguments[name] for name in order if name in self.arguments}

    @property
    def host(self) -> Host:
        """The facts about the denoiser."""
        (host,) = find_hosts(self.denoiser)
        return host

    @property
    def batch(self) -> int:
        """Number of samples in the call."""
        return len(self.arguments[self.host.sample])

    def other_arguments(self) -> dict[str, Any]:
        """Return the arguments of another call: the sample mirrored, at the timestep of a later step."""
        host, other = self.host, dict(self.arguments)
        other[host.sample] = tree_map_only(Tensor, lambda x: x.flip(-1), other[host.sample])
        if isinstance(by := host.timestep, str) and isinstance(now := other.get(by), Tensor):
            other[by] = (now * _LATER).to(now.dtype)
        return other


class _Reached(Exception):
    """Raised when the denoiser is called, to stop the pipeline."""


def first_call(
    pipe: DiffusionPipeline,
    batch: int,
    guidance: float | None,
    size: tuple[int, int],
    latent: tuple[int, int],
) -> DenoiserCall:
    """Run a pipeline up to the first call of its denoiser. The sizes are (width, height)."""
    request = GenerateOptions(prompt=_PROMPT, steps=2, batch=batch, guidance=guidance)
    call = PipelineCall.prepare(pipe, request, size)
    denoiser: Any = denoiser_of(pipe)
    found: dict[str, Any] = {}

    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(type(module).forward)
        found.update(signature.bind_partial(module, *args, **kwargs).arguments)
        raise _Reached

    hook = denoiser.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            call(pipe)
    except _Reached:
        pass
    except ValueError as error:  # the pipeline's own checks
        raise ConfigError(
            f"size: {type(pipe).__name__} cannot be called at {size[0]}x{size[1]} ({reason_of(error)}); take "
            "another size with --size"
        ) from error
    finally:
        hook.remove()
    arguments = {name: value for name, value in found.items() if value is not None}
    for name in ("self", "return_dict"):
        arguments.pop(name, None)
    return DenoiserCall(
        denoiser=denoiser,
        arguments=tree_map_only(Tensor, torch.clone, arguments),
        size=size,
        latent=(latent[1], latent[0]),
        do_classifier_free_guidance=call.guided,
    )
