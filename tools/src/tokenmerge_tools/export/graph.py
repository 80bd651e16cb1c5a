"""Converts a patched denoiser to an ONNX program, and its arguments to the program's inputs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._pytree import tree_leaves

from tokenmerge.errors import UnsupportedModelError
from tokenmerge_tools.failures import errors_as


class Graph(NamedTuple):
    """An ONNX program of PyTorch. ``inputs`` are its names in the order of :func:`tensors`."""

    program: Any
    inputs: tuple[str, ...]


@torch.no_grad()
def onnx_graph(model: nn.Module, arguments: dict[str, Any], opset: int) -> Graph:
    """Return the ONNX program of one call of a model that may be patched. Its output is ``out``."""
    with _quiet(), _exporting(type(model).__name__):
        traced = torch.export.export(model, (), {**arguments, "return_dict": False}, strict=False)
        specs = [spec for spec in traced.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        names = tuple(spec.arg.name for spec in specs if isinstance(spec.arg, TensorArgument))
        program: Any = torch.onnx.export(
            traced, dynamo=True, verbose=False, opset_version=opset, output_names=["out"], optimize=False
        )
        _clean(program.model)
    return Graph(program, names)


def tensors(arguments: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in the arguments of a call, also within lists and dictionaries."""
    return [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]


def _clean(model: Any) -> None:
    """Fold constants, and drop unused nodes and the source location of each operation.

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
    """Silence PyTorch's messages about missing packages and about its own code."""
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


def _exporting(name: str) -> contextlib.AbstractContextManager[None]:
    return errors_as(
        lambda reason: UnsupportedModelError(
            f"model: PyTorch cannot export {name} with these settings ({reason}); take "
            "--method tome, or try --ratio 0 to see whether the dense model exports"
        )
    )
