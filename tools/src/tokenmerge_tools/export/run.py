"""Exports a denoiser, checks the result against PyTorch, and describes it in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from tokenmerge.api import token_merging
from tokenmerge.config import ToMeConfig
from tokenmerge.config.checks import integer, one_of
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.report import predict
from tokenmerge_tools.export.formats import FORMATS
from tokenmerge_tools.export.graph import DenoiserCall, first_call, onnx_graph, tensors
from tokenmerge_tools.files import write_json
from tokenmerge_tools.machine import version_of
from tokenmerge_tools.method_spec import SPEEDUP, MethodSpec, merging_alone
from tokenmerge_tools.pipelines.call import latent_scale, own_size
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL, load_pipeline
from tokenmerge_tools.pipelines.meta_model import checked_source
from tokenmerge_tools.pipelines.options import Guidance, Size, image_option
from tokenmerge_tools.pipelines.settings import check_guidance, check_size

FILE = "export.json"
_VERSION = 1
_PACKAGES = ("tokenmerge", "torch", "diffusers", "onnx", "onnxscript", "onnxruntime", "openvino")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets its name when the context ends, and is removed after an exception.

    If the process is killed, ``.NAME-unfinished-…`` is left beside the folder.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"out: {folder} exists already, and is not overwritten; remove it, or choose another folder "
                "with --out"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-unfinished-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"out: cannot write to {folder} ({error.strerror or error}); choose another folder with --out"
        ) from error
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# Largest accepted difference, as a fraction of the largest output.
LARGEST_DIFFERENCE = 1e-3
# Where tokens merge, the last bit can decide which of two tokens is the more similar one. Each such choice
# changes an output by about a thousandth. A wrong choice of all tokens changes it by far more than this.
LARGEST_MERGED_DIFFERENCE = 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to export. The settings of token merging must be the same at every denoising step."""

    to: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")]
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the files, which must be new or empty.")
    ]
    model: str = DEFAULT_MODEL
    merging: MethodSpec = dataclasses.field(default_factory=MethodSpec)
    size: Size = None
    batch: Annotated[int, image_option("Images per call.", parser="integer")] = 1
    guidance: Guidance = None

    def __post_init__(self) -> None:
        one_of(tuple(FORMATS))("to", self.to)
        integer(1)("batch", self.batch)
        check_guidance("guidance", self.guidance)


def export(options: ExportOptions) -> dict[str, Any]:
    """Export the denoiser of a pipeline, and return its description."""
    source = checked_source(options.model, options.size, options.merging)

    def call() -> DenoiserCall:
        pipe = load_pipeline(source, torch.float32, torch.device("cpu"))
        pipe.set_progress_bar_config(disable=True)
        size = options.size or own_size(pipe)
        latent = check_size(size, latent_scale(pipe))
        return first_call(pipe, options.batch, options.guidance, size, latent)

    return export_denoiser(call, options.merging, options.out, options.to, options.model)


def export_denoiser(
    make_call: Callable[[], DenoiserCall], merging: MethodSpec, out: Path, to: str = "onnx", model: str = ""
) -> dict[str, Any]:
    """Export a denoiser with the arguments of one call, whose shapes become fixed.

    ``make_call`` makes the call. The denoiser is freed before the exported model runs, so nothing else should
    hold it. The result is the content of ``export.json`` in the folder.
    """
    form = FORMATS[to]
    form.require()
    with new_folder(out) as folder:
        call = make_call()
        config = settings_of(merging, call)
        report = predict(call.denoiser, config, *call.latent, call.batch)
        rows = report.rows
        other = call.other_arguments()
        with token_merging(call, config) as patch:
            patch.at_size(*call.latent)
            expected = _result(call.denoiser, other)
            program, names = onnx_graph(call.denoiser, call.arguments, form.opset)
        arrays = {name: value.numpy() for name, value in zip(names, tensors(other), strict=True)}
        guidance = "both halves of the batch hold the same sample"
        about: dict[str, Any] = {
            "kind": "tokenmerge export",
            "version": _VERSION,
            "model": model,
            "class": type(call.denoiser).__name__,
            "format": to,
            "file": form.file,
            "opset": form.opset,
            "dtype": "float32",
            "width": call.size[0],
            "height": call.size[1],
            "latent": {"height": call.latent[0], "width": call.latent[1]},
            "batch": call.batch,
            "guidance": guidance if call.do_classifier_free_guidance else None,
            "inputs": [{"name": name, **_about(array)} for name, array in arrays.items()],
            "outputs": [{"name": "out", **_about(expected)}],
            "method": merging.to_dict(),
            "settings": config.to_dict(),
            "merging": {
                "blocks": len(rows),
                "tokens": sum(row.tokens for row in rows),
                "merged_tokens": sum(row.merged_tokens for row in rows),
                "flops_dense": report.flops_dense,
                "flops_merged": report.flops_merged,
            },
        }
        del call, patch
        form.write(program, folder)
        del program
        gc.collect()
        result = form.load(folder, None)(arrays)
        merges = any(row.merged_tokens < row.tokens for row in rows)
        most = LARGEST_MERGED_DIFFERENCE if merges else LARGEST_DIFFERENCE
        engine = f"{form.packages[0]} {metadata.version(form.packages[0])}"
        about["check"] = _compared(result, expected, engine, most)
        about["files"] = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        installed = {name: version_of(name) for name in _PACKAGES}
        about["versions"] = {name: version for name, version in installed.items() if version}
        write_json(folder / FILE, about)
    return about


def settings_of(merging: MethodSpec, call: DenoiserCall) -> ToMeConfig:
    """Return the settings, which must be the same at every step.

    The plan of the default method follows the steps, so only its token merging is kept.
    """
    if merging.needs_model:
        if SPEEDUP in merging.changes:
            raise ConfigError(
                "speedup: an exported model is the same at every denoising step, and skips none; give "
                "--ratio 0.5"
            )
        merging = merging_alone(ToMeConfig.ratio, merging.changes)
    config = merging.config(call.denoiser)
    if config.follows_steps:
        raise ConfigError(
            f"{' and '.join(config.over_steps)}: an exported model is the same at every denoising step, and "
            "caches nothing for the next; leave these settings out, or give --ratio 0.5 alone"
        )
    return config


@torch.no_grad()
def _result(model: torch.nn.Module, arguments: dict[str, Any]) -> Any:
    """Return the output of a call as an array."""
    found = model(**arguments, return_dict=False)[0]
    if not isinstance(found, torch.Tensor):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} returns several images instead of one tensor, and cannot be "
            "exported yet; take another model"
        )
    return found.numpy()


def _compared(result: Any, expected: Any, engine: str, most: float) -> dict[str, Any]:
    """Return how far the exported model is from PyTorch, or raise a ConfigError if that is too far."""
    difference = _largest(result - expected)
    output = _largest(expected)
    if not difference / output <= most:
        raise ConfigError(
            f"to: in {engine} the exported model differs from PyTorch by {difference / output:.1e} of its "
            f"largest output, more than {most:g}, so no files were kept; take another format or method"
        )
    return {
        "compared_with": "PyTorch",
        "engine": engine,
        "largest_difference": difference,
        "largest_output": output,
        "relative_difference": difference / output,
    }


def _about(array: Any) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def _largest(x: Any) -> float:
    return float(np.abs(x).max())
