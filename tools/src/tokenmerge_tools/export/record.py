"""The description of an exported model, and the new folder that it goes to."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.report import Report
from tokenmerge_tools.machine import version_of

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
    """The description of an exported model. Inputs and output have a shape and a dtype.

    The size is (width, height) in pixels, the latent one is (height, width). ``guided``: the batch holds each
    sample twice, for guidance. ``merging`` says what merges in one call.
    """

    model: str
    denoiser: str
    to: str
    file: str
    opset: int
    size: tuple[int, int]
    latent: tuple[int, int]
    batch: int
    guided: bool
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    output: tuple[tuple[int, ...], str]
    method: Mapping[str, Any]
    settings: ToMeConfig
    merging: Report
    check: Check

    def to_dict(self, folder: Path) -> dict[str, Any]:
        """Return the record for JSON, with the names and sizes of the files in a folder."""
        rows = self.merging.rows
        return {
            "kind": "tokenmerge export",
            "version": _VERSION,
            "model": self.model,
            "class": self.denoiser,
            "format": self.to,
            "file": self.file,
            "opset": self.opset,
            "dtype": "float32",
            "width": self.size[0],
            "height": self.size[1],
            "latent": {"height": self.latent[0], "width": self.latent[1]},
            "batch": self.batch,
            "guidance": "both halves of the batch hold the same sample" if self.guided else None,
            "inputs": [{"name": name, **_tensor(*found)} for name, found in self.inputs.items()],
            "outputs": [{"name": "out", **_tensor(*self.output)}],
            "method": dict(self.method),
            "settings": self.settings.to_dict(),
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


def _tensor(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


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
