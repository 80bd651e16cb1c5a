"""Exports a denoiser, checks the result against PyTorch, and describes it in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
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
from tokenmerge.report import Report, predict
from tokenmerge_tools.export.formats import FORMATS
from tokenmerge_tools.export.graph import DenoiserCall, first_call, onnx_graph, tensors
from tokenmerge_tools.files import write_json
from tokenmerge_tools.machine import version_of
from tokenmerge_tools.method_spec import SPEEDUP, MethodSpec, merging_alone
from tokenmerge_tools.pipelines.call import latent_scale, own_size
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL, load_pipeline
from tokenmerge_tools.pipelines.meta_model import checked_source
from tokenmerge_tools.pipelines.options import Guidance, Size, picture
from tokenmerge_tools.pipelines.settings import check_guidance, check_size

FILE = "export.json"
_VERSION = 1
_PACKAGES = ("tokenmerge", "torch", "diffusers", "onnx", "onnxscript", "onnxruntime", "openvino")


@dataclasses.dataclass(frozen=True)
class Check:
    """How far the exported model is from PyTorch, in one call with another sample and timestep."""

    engine: str
    largest_difference: float
    largest_output: float

    @property
    def relative(self) -> float:
        """The largest difference as a fraction of the largest output."""
        return self.largest_difference / self.largest_output


@dataclasses.dataclass(frozen=True)
class ExportRecord:
    """The description of an exported model.

    ``about`` has what it is, in JSON-compatible values. ``merging`` says what merges in one call.
    """

    about: Mapping[str, Any]
    merging: Report
    check: Check

    def to_dict(self, folder: Path) -> dict[str, Any]:
        """Return the record for JSON, with the names and sizes of the files in a folder."""
        rows = self.merging.rows
        return {
            "kind": "tokenmerge export",
            "version": _VERSION,
            **self.about,
            "merging": {
                "blocks": len(rows),
                "tokens": sum(row.tokens for row in rows),
                "merged_tokens": sum(row.merged_tokens for row in rows),
                "flops_dense": self.merging.flops_dense,
                "flops_merged": self.merging.flops_merged,
            },
            "check": {
                "compared_with": "PyTorch",
                **dataclasses.asdict(self.check),
                "relative_difference": self.check.relative,
            },
            "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
            "versions": {name: version for name in _PACKAGES if (version := version_of(name))},
        }


def check_new(folder: Path) -> None:
    """Check that a folder does not exist yet, or is empty."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _refused(folder, error) from error
    if taken:
        raise ConfigError(
            f"out: {folder} exists already, and is not overwritten; remove it, or choose another folder with "
            "--out"
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets its name when the context ends, and is removed after an exception.

    If the process is killed, ``.NAME-unfinished-…`` is left beside the folder.
    """
    check_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-unfinished-", dir=folder.parent))
    except OSError as error:
        raise _refused(folder, error) from error
    try:
        yield unfinished
        check_new(folder)
        unfinished.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _refused(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"out: cannot write to {folder} ({error.strerror or error}); choose another folder with --out"
    )


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
    batch: Annotated[int, picture("Pictures per call.", parser="integer")] = 1
    guidance: Guidance = None

    def __post_init__(self) -> None:
        one_of(tuple(FORMATS))("to", self.to)
        integer(1)("batch", self.batch)
        check_guidance("guidance", self.guidance)


def export(options: ExportOptions) -> ExportRecord:
    """Export the denoiser of a pipeline."""
    FORMATS[options.to].require()
    check_new(options.out)
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
) -> ExportRecord:
    """Export a denoiser with the arguments of one call, whose shapes become fixed.

    ``make_call`` makes the call. Nothing else should hold its denoiser, which is freed before the exported
    model runs.
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
            graph = onnx_graph(call.denoiser, call.arguments, form.opset)
        arrays = {name: value.numpy() for name, value in zip(graph.inputs, tensors(other), strict=True)}
        guidance = "both halves of the batch hold the same sample"
        about: dict[str, Any] = {
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
        }
        del call, patch
        form.write(graph.program, folder)
        del graph
        gc.collect()
        engine = f"{form.packages[0]} {metadata.version(form.packages[0])}"
        result = form.load(folder, None)(arrays)
        check = Check(engine, _largest(result - expected), _largest(expected))
        merges = any(row.merged_tokens < row.tokens for row in report.rows)
        _refuse_different(check, LARGEST_MERGED_DIFFERENCE if merges else LARGEST_DIFFERENCE)
        found = ExportRecord(about, report, check)
        write_json(folder / FILE, found.to_dict(folder))
    return found


def _without_steps(merging: MethodSpec) -> MethodSpec:
    """Return what can be exported instead of the default method, whose plan follows the steps."""
    if SPEEDUP in merging.changes:
        raise ConfigError(
            "speedup: an exported model is the same at every denoising step, and skips none; give --ratio 0.5"
        )
    return merging_alone(ToMeConfig.ratio, merging.changes)


def settings_of(merging: MethodSpec, call: DenoiserCall) -> ToMeConfig:
    """Return the settings, which must be the same at every step."""
    if merging.needs_model:
        merging = _without_steps(merging)
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
            f"model: {type(model).__name__} returns several pictures instead of one tensor, and cannot be "
            "exported yet; take another model"
        )
    return found.numpy()


def _refuse_different(check: Check, most: float) -> None:
    """Raise a ConfigError if the exported model differs from PyTorch."""
    if not check.relative <= most:
        raise ConfigError(
            f"to: in {check.engine} the exported model differs from PyTorch by {check.relative:.1e} of its "
            f"largest output, more than {most:g}, so no files were kept; take another format or method"
        )


def _about(array: Any) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def _largest(x: Any) -> float:
    return float(np.abs(x).max())
