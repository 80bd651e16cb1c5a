"""Merged models as exported programs and as ONNX models."""

from __future__ import annotations

import dataclasses
import io

import onnxruntime
import pytest
import torch
from tests.models.test_every_family import call, model_of, settings
from tests.models.tiny import FAMILIES
from torch.testing import assert_close

from tokenmerge import ToMeConfig, UnsupportedModelError, apply_token_merging

HALF = ToMeConfig(ratio=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "WanTransformer3DModel"])
def test_an_exported_program_merges(name):
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    apply_token_merging(model, HALF)
    merged = call(model, arguments)
    program = torch.export.export(model, (), {**arguments, "return_dict": False}, strict=False).module()
    result = program(**arguments, return_dict=False)[0]
    assert_close(result, merged, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(result, dense)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # torch
@pytest.mark.parametrize(
    ("grid", "use_rand"),
    [((8, 8), False), ((7, 6), True)],
    ids=["whole cells, their first token", "tokens beyond cells, a random token"],
)
@pytest.mark.parametrize("name", ["UNet2DConditionModel", "SD3Transformer2DModel"])
@torch.no_grad()
def test_an_onnx_model_agrees_with_pytorch(name, grid, use_rand, tmp_path):
    """Within 1e-4 of the output's largest value, at the timestep of the export and at others."""
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, *grid)
    dense = call(model, arguments)
    apply_token_merging(model, dataclasses.replace(settings(family), seed=0 if use_rand else None))
    exported = torch.onnx.export(model, (), kwargs={**arguments, "return_dict": False}, dynamo=True)
    exported.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    taken = {argument.name for argument in session.get_inputs()}

    def result(timestep: torch.Tensor) -> torch.Tensor:
        now = {**arguments, "timestep": timestep}
        (found,) = session.run(None, {key: value.numpy() for key, value in now.items() if key in taken})
        expected = call(model, now)
        assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
        return expected

    now = arguments["timestep"]
    # What merging changes is far above the tolerance.
    assert not torch.allclose(result(now), dense, rtol=0, atol=1e-3 * dense.abs().max().item())
    result((now * 0.37 + 11).to(now.dtype))
    result((now * 0).to(now.dtype))


def _trace(model: torch.nn.Module, given: tuple) -> None:
    torch.jit.trace(model, given, check_trace=False)


def _older_onnx(model: torch.nn.Module, given: tuple) -> None:
    torch.onnx.export(model, given, io.BytesIO(), dynamo=False)


def _openvino(model: torch.nn.Module, given: tuple) -> None:
    pytest.importorskip("openvino").convert_model(model, example_input=given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", [_trace, _older_onnx, _openvino])
@pytest.mark.parametrize("name", ["UNet2DConditionModel", "FluxTransformer2DModel"])
@torch.no_grad()
def test_tracing_is_refused_with_what_to_do_instead(name, how):
    """OpenVINO puts the message into an error of its own. Once merging is removed, the model traces."""
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 8, 8)

    class ByPosition(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(arguments, given, strict=True)), return_dict=False)[0]

    given = tuple(arguments.values())
    patch = apply_token_merging(model, HALF)
    merged = call(model, arguments)
    with pytest.raises(
        UnsupportedModelError if how is not _openvino else RuntimeError, match="tokenmerge export"
    ):
        how(ByPosition().eval(), given)
    assert torch.equal(call(model, arguments), merged)
    patch.remove()
    torch.jit.trace(ByPosition().eval(), given, check_trace=False)
