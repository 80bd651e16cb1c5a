"""Every denoiser of the installed diffusers has been looked at; a new one fails until somebody does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import diffusers
import diffusers.models
import pytest

from tokenmerge.models.find import FAMILIES
from tokenmerge.models.unsupported import REASONS

DESCRIBED = {name for family in FAMILIES for name in family.CLASSES}
# Classes that take a timestep or stand beside denoisers, and have neither a family nor a reason.
OTHER = {
    "ControlNetXSAdapter": "a part of UNetControlNetXSModel",
    "CosmosControlNetModel": "it stays dense beside a denoiser that merges",
    "DreamLiteTransformer2DModel": "a part of DreamLiteUNetModel",
    "DreamLiteUNetModel": "described as the UNet2DConditionModel that it inherits from",
    "DualTransformer2DModel": "a part of a UNet",
    "MiniMaxMusic3RVQDepthDecoder": "it decodes",
    "MotionAdapter": "the weights of a part of UNetMotionModel",
    "Transformer2DModel": "a part of a UNet",
    "TransformerTemporalModel": "a part of a UNet",
    "UTransformer2DModel": "a part of UniDiffuserModel",
}
# What the timestep is called in a call.
_TIMES = {"t", "r", "sigma"}


def exported() -> Iterator[str]:
    """Yield the names of transformers, UNets and ControlNets that diffusers exports."""
    for module, names in diffusers.models._import_structure.items():
        if module.split(".")[0] in ("transformers", "controlnets", "unets"):
            yield from names


def called_with_a_timestep() -> Iterator[str]:
    """Yield the names of models whose call takes a timestep, from the source: some are not exported."""
    for file in Path(diffusers.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "ModelMixin" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and takes_timestep(node):
                    yield node.name


def takes_timestep(node: ast.ClassDef) -> bool:
    """Whether a class is a model of diffusers whose call has an argument for the timestep."""
    if not any("ModelMixin" in ast.unparse(base) for base in node.bases):
        return False
    calls = [own for own in node.body if isinstance(own, ast.FunctionDef) and own.name == "forward"]
    names = {argument.arg for own in calls for argument in (*own.args.args, *own.args.kwonlyargs)}
    return any(name in _TIMES or "timestep" in name or name.endswith("_time") for name in names)


def denoisers() -> set[str]:
    """The names of all denoisers and ControlNets; several ControlNets at once are none themselves."""
    return {name for name in (*exported(), *called_with_a_timestep()) if "Multi" not in name}


@pytest.fixture(scope="module")
def found() -> set[str]:
    return denoisers()


def test_somebody_has_looked_at_every_denoiser(found):
    """A new one is described in a family, or gets a reason in models/unsupported.py."""
    assert found - DESCRIBED - REASONS.keys() - OTHER.keys() == set()


def test_each_is_in_one_list_alone():
    assert not DESCRIBED & REASONS.keys()
    assert not DESCRIBED & OTHER.keys()
    assert not OTHER.keys() & REASONS.keys()


def test_the_search_finds_exported_and_other_models(found):
    assert {"FluxTransformer2DModel", "UVit2DModel", "UniDiffuserModel", "WuerstchenPrior"} <= found
    assert {"UNet2DConditionModel", "SD3ControlNetModel", "AudioLDM2UNet2DConditionModel"} <= found
    assert "AutoencoderKL" not in found


@pytest.mark.parametrize(
    ("body", "takes"),
    [
        ("def forward(self, sample, timestep): pass", True),
        ("def forward(self, x, *, t): pass", True),
        ("def forward(self, x, decoder_noise_time): pass", True),
        ("def forward(self, x, time_last): pass", False),
        ("def encode(self, timestep): pass", False),
    ],
)
def test_a_timestep_is_told_by_its_name(body, takes):
    (node,) = ast.parse(f"class New(ModelMixin, ConfigMixin):\n    {body}").body
    assert isinstance(node, ast.ClassDef)
    assert takes_timestep(node) is takes


def test_what_is_left_out_is_in_diffusers():
    """A class that diffusers has removed leaves the list."""
    source = "".join(
        file.read_text(encoding="utf-8") for file in Path(diffusers.__file__).parent.rglob("*.py")
    )
    assert [name for name in OTHER if f"class {name}(" not in source] == []
