"""Exports a denoiser, checks the result against PyTorch, and says in a file what it is."""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmerge.api import token_merging
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.integrations.export import record
from tokenmerge.integrations.export.call import DenoiserCall, first_call
from tokenmerge.integrations.export.folder import check_new, new_folder
from tokenmerge.integrations.export.formats import FORMATS, Arrays
from tokenmerge.integrations.export.graph import onnx_program, tensors
from tokenmerge.integrations.export.options import ExportOptions
from tokenmerge.integrations.export.record import Check, ExportRecord
from tokenmerge.measure.files import write_json
from tokenmerge.measure.method_spec import MethodSpec
from tokenmerge.measure.pipelines.call import latent_scale, own_size
from tokenmerge.measure.pipelines.checks import check_merging
from tokenmerge.measure.pipelines.loading import SourceKind, find_model, load_pipeline
from tokenmerge.measure.pipelines.sizes import check_size
from tokenmerge.measure.pipelines.sketch import load_sketch
from tokenmerge.report import predict

# As a fraction of the largest output.
LARGEST_DIFFERENCE = 1e-3


def export(options: ExportOptions) -> ExportRecord:
    """Export the denoiser of a pipeline.

    Raises:
        ConfigError: an option does not fit the model, the folder exists, or the exported model differs from
            PyTorch.
        MissingExtraError: a package is not installed.
        UnsupportedModelError: the model cannot be exported.
        NothingToMergeError: no token would merge.
    """
    FORMATS[options.to].require()
    check_new(options.out)
    source = find_model(options.model)
    if source.kind is not SourceKind.CHECKPOINT:  # before the weights are read
        sketch = load_sketch(source)
        if (size := options.size or sketch.size) is not None:
            check_merging(sketch, size, options.merging)

    def call() -> DenoiserCall:
        pipe = load_pipeline(source, torch.float32, torch.device("cpu"))
        pipe.set_progress_bar_config(disable=True)
        size = options.size or own_size(pipe)
        return first_call(pipe, options, size, check_size(size, latent_scale(pipe)))

    return export_denoiser(call, options.merging, options.out, options.to, options.model)


def export_denoiser(
    make_call: Callable[[], DenoiserCall], merging: MethodSpec, out: Path, to: str = "onnx", model: str = ""
) -> ExportRecord:
    """Export a denoiser with the arguments of one call, whose shapes become fixed.

    Args:
        make_call: makes the call. Nothing else should hold its denoiser, which is freed before the exported
            model runs.
        merging: the method and its settings; they must be the same at every denoising step.
        out: folder for the files, which must not exist yet, or be empty.
        to: ``"onnx"`` or ``"openvino"``.
        model: name of the model, for the record.

    Raises:
        ConfigError, MissingExtraError, UnsupportedModelError, NothingToMergeError: as for :func:`export`.
    """
    form = FORMATS[to]
    form.require()
    with new_folder(out) as folder:
        call = make_call()
        config = settings_of(merging, call)
        report = predict(call.denoiser, config, *call.latent, call.batch)
        other = call.other_arguments()
        with token_merging(call, config) as patch:
            patch.at_size(*call.latent)
            expected = _result(call.denoiser, other)
            program, names = onnx_program(call.denoiser, call.arguments, form.opset)
        arrays = {name: value.numpy() for name, value in zip(names, tensors(other), strict=True)}
        about: dict[str, Any] = {
            "denoiser": type(call.denoiser).__name__,
            "size": call.size,
            "latent": call.latent,
            "batch": call.batch,
            "guided": call.do_classifier_free_guidance,
        }
        del call, patch
        form.write(program, folder)
        del program
        gc.collect()
        found = ExportRecord(
            model=model,
            to=to,
            file=form.file,
            opset=form.opset,
            inputs={name: (value.shape, str(value.dtype)) for name, value in arrays.items()},
            output=(expected.shape, str(expected.dtype)),
            method=merging.to_dict(),
            settings=config,
            merging=report,
            check=_check(to, folder, arrays, expected),
            **about,
        )
        write_json(folder / record.FILE, found.to_dict(folder))
    return found


def settings_of(merging: MethodSpec, call: DenoiserCall) -> ToMeConfig:
    """The settings, the same at every step.

    Raises:
        ConfigError: they follow the denoising steps.
    """
    config = merging.config(call.denoiser, follows_steps=False)
    if config.follows_steps:
        raise ConfigError(
            f"{' and '.join(config.over_steps)}: an exported model is the same at every denoising step, and "
            "keeps nothing for the next; leave these settings out, or take --method auto, of which only the "
            "merging is exported"
        )
    return config


@torch.no_grad()
def _result(model: torch.nn.Module, arguments: dict[str, Any]) -> Any:
    """The output of a call as an array."""
    found = model(**arguments, return_dict=False)[0]
    if not isinstance(found, torch.Tensor):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} returns several pictures instead of one tensor, and cannot be "
            "exported yet; take another model"
        )
    return found.numpy()


def _check(to: str, folder: Path, arrays: Arrays, expected: Any) -> Check:
    """Compare the exported model with PyTorch's output for the same inputs.

    Raises:
        ConfigError: they differ.
    """
    form = FORMATS[to]
    found = form.load(folder, None)(arrays)
    check = Check(
        engine=f"{form.packages[0]} {metadata.version(form.packages[0])}",
        largest_difference=float(np.abs(found - expected).max()),
        largest_output=float(np.abs(expected).max()),
    )
    if not check.relative <= LARGEST_DIFFERENCE:
        raise ConfigError(
            f"to: in {check.engine} the exported model differs from PyTorch by {check.relative:.1e} of its "
            f"largest output, more than {LARGEST_DIFFERENCE:g}, so nothing was kept; take another format or "
            "method"
        )
    return check
