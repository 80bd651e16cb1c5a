"""Exported denoisers: what they compute, their records, refused options, and interrupted exports."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from tests.models.test_every_family import model_of, settings
from tests.models.tiny import FAMILIES

from tokenmerge import ToMeConfig, token_merging
from tokenmerge.plans import pays_from
from tokenmerge_tools.cli import main
from tokenmerge_tools.export import export_denoiser, formats, run
from tokenmerge_tools.export.graph import DenoiserCall
from tokenmerge_tools.method_spec import MethodSpec

# Both sides round differently, by 1e-6 of the largest output in networks this small; what merging changes is
# far above.
CLOSE = 1e-4
RATIOS = {"dense": 0.0, "merged": 0.5}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
    ),  # torch
]
needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs openvino")


def command(folder, out, *more):
    return main(["export", str(folder), "-o", str(out), "--method", "tome", *map(str, more)])


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """Exports of the tiny pipeline by format and name, made once."""
    made: dict[tuple[str, str], Path] = {}

    def get(to: str, name: str) -> Path:
        if (to, name) not in made:
            out = tmp_path_factory.mktemp("exports") / f"{to}-{name}"
            assert command(folder, out, "--to", to, "--ratio", RATIOS[name]) == 0
            made[to, name] = out
        return made[to, name]

    return get


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(1, 4, 16, 16, generator=generator)
    return {
        "sample": torch.cat([sample, sample]),
        "timestep": torch.tensor(41),
        "encoder_hidden_states": torch.randn(2, 16, 16, generator=generator),
    }


def run_onnx(folder, arguments):
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    taken = {one.name for one in session.get_inputs()}
    feeds = {name: value.numpy() for name, value in arguments.items() if name in taken}
    return torch.from_numpy(session.run(None, feeds)[0])


def run_openvino(folder, arguments):
    import openvino

    model = openvino.Core().compile_model(folder / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    taken = {name for one in model.inputs for name in one.get_names()}
    return torch.from_numpy(
        model({name: value.numpy() for name, value in arguments.items() if name in taken})[0]
    )


RUN = {"onnx": run_onnx, "openvino": run_openvino}
FORMAT = pytest.mark.parametrize("to", ["onnx", pytest.param("openvino", marks=needs_openvino)])


def distance(found, expected):
    """The largest difference as a fraction of the largest output."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


class Guided:
    """Says that the batch holds each sample twice, as a pipeline does."""

    do_classifier_free_guidance = True

    def __init__(self, unet):
        self.unet = unet


# --- what an exported model computes --------------------------------------------------------------


@torch.no_grad()
def test_a_dense_export_is_the_unpatched_model(exported, pipe, inputs):
    found = run_onnx(exported("onnx", "dense"), inputs)
    assert distance(found, pipe.unet(**inputs).sample) < CLOSE


@FORMAT
@torch.no_grad()
def test_a_merged_export_is_the_patched_model(exported, pipe, inputs, to):
    """At a new timestep and a new sample, with newly drawn destinations."""
    dense = pipe.unet(**inputs).sample
    found = RUN[to](exported(to, "merged"), inputs)
    guided = Guided(pipe.unet)
    with token_merging(guided, ToMeConfig(ratio=0.5)):
        assert distance(found, pipe.unet(**inputs).sample) < CLOSE
    assert distance(found, dense) > 10 * CLOSE
    with token_merging(guided, ToMeConfig(ratio=0.5, seed=1)):  # other tokens merge
        assert distance(found, pipe.unet(**inputs).sample) > run.LARGEST_MERGED_DIFFERENCE


@FORMAT
@torch.no_grad()
def test_a_merged_transformer_is_the_patched_one(tmp_path, to):
    family = FAMILIES["SD3Transformer2DModel"]
    arguments = family.inputs(1, 8, 8)
    call = DenoiserCall(model_of(family), arguments, (128, 128), (16, 16))
    method = MethodSpec("tome", {"ratio": 0.5, "planner": "tiled", "proportional": True})
    found = export_denoiser(lambda: call, method, tmp_path / "out", to)
    assert found["check"]["relative_difference"] < CLOSE
    now = {**arguments, "timestep": torch.tensor([77.0])}
    with token_merging(call.denoiser, settings(family, planner="tiled", proportional=True)):
        expected = call.denoiser(**now, return_dict=False)[0]
    assert distance(RUN[to](tmp_path / "out", now), expected) < CLOSE


# --- what its file says ---------------------------------------------------------------------------


def test_the_file_says_what_the_model_is(exported, folder):
    out = exported("onnx", "merged")
    said = json.loads((out / "export.json").read_text(encoding="utf-8"))
    session = onnxruntime.InferenceSession(out / said["file"], providers=["CPUExecutionProvider"])
    types = {"float32": "tensor(float)", "int64": "tensor(int64)"}
    assert {(i["name"], tuple(i["shape"]), types[i["dtype"]]) for i in said["inputs"]} == {
        (i.name, tuple(i.shape), i.type) for i in session.get_inputs()
    }
    assert [(i["name"], i["shape"]) for i in said["outputs"]] == [
        (i.name, i.shape) for i in session.get_outputs()
    ]
    assert said["model"] == str(folder)
    assert said["class"] == "UNet2DConditionModel"
    assert (said["width"], said["height"], said["batch"]) == (32, 32, 2)
    assert ToMeConfig.from_dict(said["settings"]) == ToMeConfig(ratio=0.5)
    # Blocks of the finest level: one down, two up, each with 16 × 16 tokens of which half are removed.
    assert said["merging"]["merged_tokens"] * 2 == said["merging"]["tokens"] == 3 * 256
    assert said["check"]["relative_difference"] < CLOSE
    assert said["check"]["engine"] == f"onnxruntime {onnxruntime.__version__}"
    assert said["versions"]["torch"] == torch.__version__
    assert said["files"].keys() | {"export.json"} == {file.name for file in out.iterdir()}


def test_an_exported_file_names_no_path_of_the_machine(exported):
    assert (
        str(Path(__file__).parents[3]).encode()
        not in (exported("onnx", "merged") / "model.onnx").read_bytes()
    )
    assert b"site-packages" not in (exported("onnx", "merged") / "model.onnx").read_bytes()


def test_auto_is_its_merging_part(folder, tmp_path, monkeypatch):
    """Tiled matching at the finest level at a ratio of 0.5, and no setting that follows the steps."""
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(4))
    seen, settings_of = {}, run.settings_of

    def look(merging, call):
        seen["config"] = settings_of(merging, call)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "settings_of", look)
    assert main(["export", str(folder), "--to", "onnx", "-o", str(tmp_path / "out")]) == 130
    config = seen["config"]
    assert (config.ratio, config.planner, config.max_downsample) == (0.5, "tiled", 1)
    assert not config.follows_steps


# --- how it is used in a loop ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")  # diffusers
@torch.no_grad()
def test_the_loop_in_the_documents_draws_the_merged_picture(exported, pipe, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    snippet, *_ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    unet, names = pipe.unet, {"pipe": pipe}
    with token_merging(Guided(unet), ToMeConfig(ratio=0.5)):
        arguments = {"num_inference_steps": 4, "generator": torch.Generator().manual_seed(0)}
        expected = pipe("a red apple", output_type="np", **arguments).images
    out = exported("onnx", "merged")
    monkeypatch.chdir(out.parent)
    exec(compile(snippet.replace('"exported', f'"{out.name}'), "export.md", "exec"), names)
    assert pipe.unet is not unet
    arguments["generator"].manual_seed(0)
    found = pipe("a red apple", output_type="np", **arguments).images
    assert np.abs(found - expected).max() < 1e-3  # values from 0 to 1, after four steps


# --- what is refused ------------------------------------------------------------------------------


def refused(capsys, folder, out, *more):
    assert command(folder, out, *more) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    assert len(line) < 400
    return line


def test_a_size_that_the_model_does_not_take(folder, tmp_path, capsys):
    line = refused(capsys, folder, tmp_path / "out", "--to", "onnx", "--size", "33")
    assert "multiples of 2 pixels, got 33x33; use 32x32" in line
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it(folder, tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    line = refused(capsys, folder, tmp_path, "--to", "onnx")
    assert f"out: {tmp_path} exists already" in line
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_format(folder, tmp_path, capsys):
    assert "to: expected" in refused(capsys, folder, tmp_path / "out", "--to", "tensorrt")


def test_settings_that_follow_the_steps(folder, tmp_path, capsys):
    line = refused(capsys, folder, tmp_path / "out", "--to", "onnx", "--set", "reuse.every=2")
    assert "reuse.every=2: an exported model is the same at every denoising step" in line
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package(folder, tmp_path, capsys, monkeypatch):
    stop(monkeypatch, "openvino", packages=("openvino_is_not_here", "onnx"))
    line = refused(capsys, folder, tmp_path / "out", "--to", "openvino")
    assert "OpenVINO needs openvino_is_not_here, which is not installed; run: pip install" in line
    assert '[export]"' in line  # of this checkout, or of the release
    stop(monkeypatch, "openvino", packages=("openvino_is_not_here", "nor_is_this"))
    line = refused(capsys, folder, tmp_path / "out", "--to", "openvino")
    assert "OpenVINO needs openvino_is_not_here, nor_is_this, which are not installed; run: pip" in line


def stop(monkeypatch, to, **changes):
    changed = formats.dataclasses.replace(formats.FORMATS[to], **changes)
    monkeypatch.setitem(formats.FORMATS, to, changed)


@pytest.mark.parametrize(("ratio", "off"), [("0", 0.002), ("0.5", 0.02)])
def test_an_export_that_differs_from_pytorch_is_not_kept(folder, tmp_path, capsys, monkeypatch, ratio, off):
    load = formats.FORMATS["onnx"].load
    stop(monkeypatch, "onnx", load=lambda *given: lambda arrays: load(*given)(arrays) * (1 + off))
    line = refused(capsys, folder, tmp_path / "out", "--to", "onnx", "--ratio", ratio)
    assert f"differs from PyTorch by {off:.1e} of its largest output, more than {off / 2:g}" in line
    assert list(tmp_path.iterdir()) == []


# --- what a stop leaves ---------------------------------------------------------------------------


def test_an_interrupted_export_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    def write(program, folder):
        (folder / "half").write_text("of a model")
        raise KeyboardInterrupt

    stop(monkeypatch, "onnx", write=write)
    assert command(folder, tmp_path / "out", "--to", "onnx", "--ratio", "0") == 130
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_folder_of_its_name(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tokenmerge_tools.export.run import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('of a model')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
