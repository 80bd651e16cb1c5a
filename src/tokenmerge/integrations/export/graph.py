"""From a patched denoiser to an ONNX program, and from its arguments to the program's inputs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._pytree import tree_leaves

from tokenmerge.errors import TokenMergingError, UnsupportedModelError
from tokenmerge.measure.out_of_memory import is_out_of_memory

OUTPUT = "out"
_LONGEST_REASON = 150


@torch.no_grad()
def onnx_program(model: nn.Module, arguments: dict[str, Any], opset: int) -> tuple[Any, tuple[str, ...]]:
    """The ONNX program of one call, and the names of its inputs in the order of :func:`tensors`.

    Raises:
        UnsupportedModelError: PyTorch cannot export the model with these settings.
    """
    with _quiet(), _exporting(type(model).__name__):
        traced = torch.export.export(model, (), {**arguments, "return_dict": False}, strict=False)
        specs = [spec for spec in traced.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        names = tuple(spec.arg.name for spec in specs if isinstance(spec.arg, TensorArgument))
        program: Any = torch.onnx.export(
            traced, dynamo=True, verbose=False, opset_version=opset, output_names=[OUTPUT], optimize=False
        )
        _clean(program.model)
    return program, names


def tensors(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors in the arguments of a call, also within lists and dictionaries."""
    return [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]


def _clean(model: Any) -> None:
    """Compute what is constant, and drop what is not used and where each operation comes from in the source.

    PyTorch's own optimisation also rewrites patterns, which takes most of the time of an export; the programs
    that run the model do that themselves.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, CommonSubexpressionEliminationPass
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    fold_constants(model)
    CommonSubexpressionEliminationPass()(model)
    remove_unused_nodes(model)
    ClearMetadataAndDocStringPass()(model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's remarks on packages that it does not find, and on its own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _exporting(name: str) -> Iterator[None]:
    try:
        yield
    except TokenMergingError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0][:_LONGEST_REASON] or type(error).__name__
        raise UnsupportedModelError(
            f"model: PyTorch cannot export {name} with these settings ({reason}); take --method tome, or try "
            "--ratio 0 to see whether the dense model exports"
        ) from error
