"""The formats: how each writes a model, and how it runs the written files."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenmerge.errors import MissingExtraError

Arrays = Mapping[str, Any]  # arrays by the names of a model's inputs
Run = Callable[[Arrays], Any]  # a function from the inputs to the output


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of exported models, for the program ``title``. It needs ``packages``.

    ``write`` writes an ONNX program of PyTorch to a folder. ``load`` makes a function that runs the model in
    this folder on a number of threads, or on all threads if the number is None.
    """

    title: str
    opset: int
    packages: tuple[str, ...]
    file: str
    write: Callable[[Any, Path], None]
    load: Callable[[Path, int | None], Run]

    def require(self) -> None:
        """Raise a MissingExtraError if a package is not installed."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            needed_by = f"to: {self.title} needs {', '.join(missing)}"
            raise MissingExtraError("tokenmerge-tools[export]", needed_by, packages=len(missing))


def _write_onnx(program: Any, folder: Path) -> None:
    program.save(folder / "model.onnx", external_data=True)


def _load_onnx(folder: Path, threads: int | None) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    inputs = {one.name for one in session.get_inputs()}
    return lambda arrays: session.run(None, {name: arrays[name] for name in arrays if name in inputs})[0]


def _write_openvino(program: Any, folder: Path) -> None:
    import openvino

    onnx = folder / "onnx"
    onnx.mkdir()
    _write_onnx(program, onnx)
    # This does not use convert_model, which reports its use over the network.
    model = openvino.Core().read_model(onnx / "model.onnx")
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
    del model  # it keeps the file of the weights open
    for file in onnx.iterdir():
        file.unlink()
    onnx.rmdir()


def _load_openvino(folder: Path, threads: int | None) -> Run:
    import openvino

    # bfloat16 is the default on CPUs that have it, but matching then finds other tokens than in float32.
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    model = openvino.Core().compile_model(folder / "model.xml", "CPU", settings)
    inputs = {name for one in model.inputs for name in one.get_names()}
    return lambda arrays: model({name: arrays[name] for name in arrays if name in inputs})[0]


FORMATS = {
    # From opset 23 on, attention is one operator, but ONNX Runtime 1.32 refuses masks of one row there.
    "onnx": Format(
        *("ONNX Runtime", 20, ("onnxruntime", "onnx", "onnxscript"), "model.onnx"),
        *(_write_onnx, _load_onnx),
    ),
    # With this operator OpenVINO always finds its fused attention.
    "openvino": Format(
        *("OpenVINO", 23, ("openvino", "onnx", "onnxscript"), "model.xml"),
        *(_write_openvino, _load_openvino),
    ),
}
