"""The call of a denoiser that is exported, which is its pipeline's first, and its ONNX program."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._pytree import tree_leaves, tree_map_only

from tokenmerge.errors import ConfigError, UnsupportedModelError, reason_of
from tokenmerge.models.base import Host
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.failures import errors_as
from tokenmerge_tools.pipelines.call import PipelineCall
from tokenmerge_tools.pipelines.loading import denoiser_of, quiet_loggers
from tokenmerge_tools.pipelines.options import GenerateOptions

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PROMPT = "a red apple on a table"
_LATER = 0.37  # the timestep of the call that checks the result, over that of the exported call


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
        """Return the arguments of another call, with the sample mirrored and the timestep of a later step."""
        host = self.host
        other = dict(self.arguments)
        other[host.sample] = tree_map_only(Tensor, lambda x: x.flip(-1), other[host.sample])
        if isinstance(host.timestep, str):
            now = other.get(host.timestep)
            if isinstance(now, Tensor):
                other[host.timestep] = (now * _LATER).to(now.dtype)
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


@torch.no_grad()
def onnx_graph(model: nn.Module, arguments: dict[str, Any], opset: int) -> tuple[Any, list[str]]:
    """Return the ONNX program of one call of a model that may be patched, and the names of its inputs.

    The names are in the order of :func:`tensors`. The output of the program is named ``out``.
    """
    quiet = quiet_loggers("torch.onnx", "onnxscript", "onnx_ir")
    exporting = errors_as(
        lambda reason: UnsupportedModelError(
            f"model: PyTorch cannot export {type(model).__name__} with these settings ({reason}); take "
            "--method tome, or try --ratio 0 to see whether the dense model exports"
        )
    )
    with quiet, warnings.catch_warnings(), exporting:
        warnings.simplefilter("ignore")
        traced = torch.export.export(model, (), {**arguments, "return_dict": False}, strict=False)
        specs = [spec for spec in traced.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        names = [spec.arg.name for spec in specs if isinstance(spec.arg, TensorArgument)]
        program: Any = torch.onnx.export(
            traced, dynamo=True, verbose=False, opset_version=opset, output_names=["out"], optimize=False
        )
        _clean(program.model)
    return program, names


def tensors(arguments: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in the arguments of a call, also within lists and dictionaries."""
    return [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]


def _clean(model: Any) -> None:
    """Fold constants, and drop unused nodes and the source location of each operation.

    PyTorch's own optimisation also rewrites patterns. That takes long, and the runtimes do it themselves.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, CommonSubexpressionEliminationPass
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    fold_constants(model)
    CommonSubexpressionEliminationPass()(model)
    remove_unused_nodes(model)
    ClearMetadataAndDocStringPass()(model)
