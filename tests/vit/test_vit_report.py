"""What the report of a vision transformer says, against real runs and against the formula."""

import re

import pytest
import torch
import transformers
import vits
from torch.utils.flop_counter import FlopCounterMode

from tokenmerge import ConfigError, ViTConfig, apply_token_merging, token_merging
from tokenmerge.vit.report import predict_vit


def vit_b() -> transformers.ViTModel:
    with torch.device("meta"):
        return transformers.ViTModel(transformers.ViTConfig()).eval()


@torch.no_grad()
def flops(model: torch.nn.Module, x: torch.Tensor) -> int:
    """FLOPs of a real run, with attention by plain products, which the counter knows on every device."""
    kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, kernel:
        model(x)
    return counter.get_total_flops()


@torch.no_grad()
def test_r_8_on_12_layers_of_vit_b_ends_with_96_tokens_fewer():
    model = vit_b()
    apply_token_merging(model, ViTConfig(r=8))
    assert model(torch.zeros(1, 3, 224, 224, device="meta")).last_hidden_state.shape == (1, 197 - 96, 768)


@pytest.mark.parametrize("make", vits.MODELS, ids=lambda make: make.__name__)
def test_the_counts_are_those_of_real_runs(make):
    model, x = make(), vits.pictures(1)
    dense = flops(model, x)
    with token_merging(model, ViTConfig(r=5)) as patch:
        report = patch.report()
        assert (report.flops_dense, report.flops_merged) == (dense, flops(model, x))
    assert report.flops_merged < dense
    assert [row.tokens - row.merged_tokens for row in report.rows] == [5] * 4


def test_the_counts_of_a_layer_are_the_analytic_ones():
    """Projections 8nc² and attention 4n²c on n tokens, MLP 16mc² on m, similarities 2sdc/12 of s with d."""
    c, n = 768, 197
    report = predict_vit(vit_b(), ViTConfig(r=13))
    total = 0
    for row in report.rows:
        m, d, s = n - 13, n // 2, (n - 1) // 2
        assert (row.tokens, row.merged_tokens) == (n, m)
        assert row.flops_dense == 24 * 197 * c**2 + 4 * 197**2 * c
        assert row.flops_merged == 8 * n * c**2 + 4 * n**2 * c + 16 * m * c**2 + 2 * s * d * c // 12
        total += row.flops_dense - row.flops_merged
        n = m
    assert report.flops_dense - report.flops_merged == total


def test_the_table_and_the_size_of_the_pictures():
    lines = str(predict_vit(vit_b(), ViTConfig(r=8), 224, 448, batch=2)).splitlines()
    assert lines[0] == "ViTModel: 224 × 448 pixels, batch 2"
    assert lines[1].split() == ["layer", "tokens", "GFLOPs", "saved"]
    assert "layers.11    305 → 297" in lines[13]
    assert lines[14].startswith("whole model")
    assert len(lines) == 15


def test_a_layer_that_cannot_remove_as_many_says_so():
    notes = predict_vit(vits.vit(), ViTConfig(r=16)).notes
    assert notes[0] == "layers.1 removes 10 tokens instead of 16: at most half of those that may merge"
    assert len(notes) == 3
    assert predict_vit(vits.vit(), ViTConfig(r=0)).notes == ("r=0: every layer stays dense, as asked",)
    assert predict_vit(vits.vit(), ViTConfig(unmerge=True, r=1)).notes == (
        "layers.3 gives each input token a result, as asked",
    )


def test_looking_changes_nothing_on_a_patched_model():
    model, x = vits.clip(), vits.pictures()
    patch = apply_token_merging(model, ViTConfig(r=6))
    with torch.no_grad():
        merged = vits.tokens(model, x)
        assert patch.report().to_dict()["rows"][0]["tokens"] == 37
        assert predict_vit(model, ViTConfig(r=1)).flops_merged > patch.report().flops_merged
        assert torch.equal(vits.tokens(model, x), merged)


# Classes of transformers, and settings of timm's class.
CLASSES = ["ViTModel", "DeiTModel", "CLIPVisionModel", "SiglipVisionModel", "Dinov2Model", "Dinov2Backbone"]
CLASSES += ["Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"]
TIMM = [{}, {"dynamic_img_size": True}, {"dynamic_img_size": True, "dynamic_img_pad": True}]


def sized(kind: str | dict, size: int) -> torch.nn.Module:
    if isinstance(kind, dict):
        return vits.timm(img_size=size, **kind)
    shape = vits._dinov2_settings() if "Dinov2" in kind else vits.SHAPE
    config = getattr(transformers, kind.replace("Model", "Backbone").replace("Backbone", "Config"))
    return getattr(transformers, kind)(config(**{**shape, "image_size": size})).eval()


@pytest.mark.parametrize("kind", [*CLASSES, *TIMM], ids=str)
def test_a_handle_prints_before_the_first_call_whatever_the_size(kind):
    """25 is no multiple of the patch size, 4 is one patch, and 3 is less than one."""
    for size, expected in (
        (25, "px|takes no images of 25"),
        (4, "nothing to merge"),
        (3, "3 × 3 pixels: "),
    ):
        patch = apply_token_merging(sized(kind, size), ViTConfig(r=3))
        assert re.search(expected, repr(patch))
        assert str(patch) == repr(patch)
    with pytest.raises(ConfigError, match=r"height, width: .* takes no images of 3 × 3 pixels: "):
        patch.report()


def test_a_handle_prints_when_its_model_was_changed_or_is_gone():
    class Pipeline:
        def __init__(self) -> None:
            self.image_encoder = vits.vit()

    pipe = Pipeline()
    gone = apply_token_merging(pipe, ViTConfig())
    pipe.image_encoder = None
    assert "ViTModel" in repr(gone)
    assert "not counted: no vision transformer" in repr(gone)

    model = vits.timm()
    cut = apply_token_merging(model, ViTConfig(r=[4, 3, 2, 1]))
    model.prune_intermediate_layers([1])
    assert "not counted: r: expected 2 numbers" in repr(cut)

    class Weird(vits.timm_vits().VisionTransformer):
        def __deepcopy__(self, memo: dict) -> None:
            raise KeyError("no copies")

    model = vits.timm()
    model.__class__ = Weird
    assert "not counted: 'no copies'" in repr(apply_token_merging(model, ViTConfig()))


def test_a_height_of_zero_is_refused():
    with pytest.raises(ConfigError, match="height: expected an integer ≥ 1, got 0"):
        predict_vit(vits.vit(), ViTConfig(), 0)
