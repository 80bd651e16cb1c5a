"""Sequences that hold reference images after the image that is made: each has a grid and a ratio.

What holds for every family holds for these too: see ``test_every_family``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.models.test_every_family import call, model_of, reordering
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import (
    ConfigError,
    NothingToMergeError,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
)
from tokenmerge.config import Correction
from tokenmerge.planners import PLANNERS
from tokenmerge.report import predict
from tokenmerge.runtime.memory.state import RecordedPlan

# For images of 8 × 8 tokens: the grids of their references.
REFERENCES = {
    "FluxTransformer2DModel, Kontext": [(1, 16, 8)],
    "Flux2Transformer2DModel, two references": [(1, 8, 8), (1, 11, 8)],
    "LongCatImageTransformer2DModel, Edit": [(1, 8, 8)],
    "BriaFiboTransformer2DModel, Edit": [(1, 10, 8)],
    "QwenImageTransformer2DModel, Edit": [(1, 9, 8), (1, 16, 8)],
    "QwenImageTransformer2DModel, Layered": [(1, 9, 8)],
    "JoyImageEditTransformer3DModel": [(1, 8, 8)] * 2,
    "JoyImageEditPlusTransformer3DModel": [(1, 9, 8), (1, 16, 8)],
}
EVERY = pytest.mark.parametrize("name", REFERENCES)
KONTEXT, FLUX, JOY = (
    "FluxTransformer2DModel, Kontext",
    "FluxTransformer2DModel",
    "JoyImageEditTransformer3DModel",
)
DENSE_TARGET = {"ratio": 0, "reference_ratio": 0.75}


def planned(name: str, **settings: Any) -> tuple[RecordedPlan, Tensor]:
    """A plan of a call, and the result of the call."""
    model = model_of(FAMILIES[name])
    with apply_token_merging(model, ToMeConfig(**settings)).record() as recorded:
        result = call(model, FAMILIES[name].inputs(2, 8, 8))
    return next(iter(recorded.values())), result


def of_pictures(name: str) -> list[int]:
    """Number of tokens of each image, the image being made first."""
    return [64 * FAMILIES[name].frames, *(rows * columns for _, rows, columns in REFERENCES[name])]


@EVERY
def test_tokens_merge_within_their_picture_on_its_own_grid(name):
    """``uniform`` makes one token of each 2 × 2 cell with a drawn destination: rows and columns matter."""
    found, _ = planned(name, ratio=0.75, planner="uniform", seed=None)
    assert (found.grid, list(found.references)) == ((FAMILIES[name].frames, 8, 8), REFERENCES[name])
    start, made = 0, []
    for frames, rows, columns in [found.grid, *found.references]:
        for _ in range(frames):
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            # A last row beyond the last cell joins the cell above it.
            cell = (y // 2).clamp(max=rows // 2 - 1) * (columns // 2) + x // 2
            made.append(cell.flatten() + start)
            start += (rows // 2) * (columns // 2)
    cells, labels = torch.cat(made), found.plan.labels()[0]
    same_cell, same_label = cells[:, None] == cells, labels[:, None] == labels
    assert torch.equal(same_label, same_cell)


@EVERY
def test_reference_pictures_have_a_ratio_of_their_own(name):
    target, *references = of_pictures(name)
    frames = FAMILIES[name].frames
    for ratio, reference_ratio in ((0.25, 0.75), (0.5, 0), (0, 0.75)):
        found, _ = planned(name, ratio=ratio, reference_ratio=reference_ratio)
        labels = found.plan.labels()[0].split([target, *references])
        kept = [len(own.unique()) for own in labels]
        removed = [frames * int(target // frames * ratio), *(int(n * reference_ratio) for n in references)]
        assert kept == [n - r for n, r in zip([target, *references], removed, strict=True)]
        assert found.plan.keep.shape[1] == sum(kept)


@EVERY
def test_without_a_ratio_of_their_own_they_merge_as_the_picture_does(name):
    (_, alike), (_, given) = planned(name, ratio=0.5), planned(name, ratio=0.5, reference_ratio=0.5)
    assert torch.equal(alike, given)


@EVERY
def test_merging_the_references_alone_leaves_every_token_of_the_picture_in_the_attention(name):
    found, merged = planned(name, **DENSE_TARGET)
    target = of_pictures(name)[0]
    kept = found.plan.kept()
    assert all(sorted(own[own < target].tolist()) == list(range(target)) for own in kept)
    model = model_of(FAMILIES[name])
    dense = call(model, FAMILIES[name].inputs(2, 8, 8))
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)


@pytest.mark.parametrize("name", [KONTEXT, JOY, "JoyImageEditPlusTransformer3DModel"])
def test_whole_blocks_follow_the_pictures(name, monkeypatch):
    """Reordered tokens give the same result up to rounding, and merged tokens another one."""
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 7, 5)
    dense = call(model, arguments)
    merged = apply_token_merging(model, ToMeConfig(scope="block", **DENSE_TARGET))
    assert not torch.allclose(call(model, arguments), dense)
    merged.remove()
    monkeypatch.setitem(PLANNERS, "tome", reordering)
    apply_token_merging(model, ToMeConfig(scope="block", ratio=0.5))
    reordered = call(model, arguments)
    assert_close(reordered, dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("settings", [{"ratio": 0.5}, DENSE_TARGET])
def test_every_planner_plans_each_picture(planner, settings):
    family = FAMILIES[KONTEXT]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    handle = apply_token_merging(model, ToMeConfig(planner=planner, **settings))
    handle.at_step(0, 2)
    assert not torch.equal(call(model, arguments), dense)


def test_guidance_says_which_tokens_of_the_sequence_matter(monkeypatch):
    """The second step knows, for every token of the sequence, what guidance changed in the first."""
    family = FAMILIES[KONTEXT]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    plan, known = PLANNERS["importance"], []

    def watched(*given: Any) -> Any:
        known.append(given[-1])
        return plan(*given)

    monkeypatch.setitem(PLANNERS, "importance", watched)
    handle = apply_token_merging(model, ToMeConfig(ratio=0.5, planner="importance"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            handle.at_step(step, 2)
            text = arguments["encoder_hidden_states"]
            results = [call(model, {**arguments, "encoder_hidden_states": words}) for words in (text, -text)]
            if step == 0:
                assert not known
                change = (results[0] - results[1]).abs().mean(dim=2)
    assert known
    pictures = [64, *(rows * columns for _, rows, columns in REFERENCES[KONTEXT])]
    for found, expected in zip(
        known, change.split(pictures, dim=1) * (len(known) // len(pictures)), strict=True
    ):
        assert_close(found, expected)


def kontext_of_pairs() -> tuple[nn.Module, dict[str, Any]]:
    """A model whose tokens are equal in pairs of columns, and a call of it. Positions have no effect."""
    model, arguments = model_of(FAMILIES[KONTEXT]), FAMILIES[KONTEXT].inputs(1, 8, 8)
    pairs = arguments["hidden_states"].unflatten(1, (-1, 2))
    arguments["hidden_states"] = pairs[:, :, :1].expand_as(pairs).flatten(1, 2)
    model.pos_embed.forward = lambda ids: (torch.ones(len(ids), 8), torch.zeros(len(ids), 8))
    return model, arguments


def joy_of_pairs() -> tuple[nn.Module, dict[str, Any]]:
    model, arguments = model_of(FAMILIES[JOY]), FAMILIES[JOY].inputs(1, 8, 8)
    pairs = arguments["hidden_states"].unflatten(-1, (-1, 2, 2))
    arguments["hidden_states"] = pairs[..., :1, :].expand_as(pairs).flatten(-3)
    tokens = 3 * 64
    model.get_rotary_pos_embed = lambda **_: ((torch.ones(tokens, 8), torch.zeros(tokens, 8)), None)
    return model, arguments


@pytest.mark.parametrize("of_pairs", [kontext_of_pairs, joy_of_pairs])
def test_merged_tokens_of_every_picture_count_as_often_as_they_stand_for(of_pairs):
    """If tokens are equal in pairs, proportional attention over merged pairs equals attention over all."""
    model, arguments = of_pairs()
    dense = call(model, arguments)
    # The image stays whole, so that sizes differ. Sizes on the wrong side would be those of text.
    config = ToMeConfig(
        ratio=0, reference_ratio=0.5, sx=2, sy=1, planner="uniform", merge_mlp=True, proportional=True
    )
    apply_token_merging(model, config)
    assert_close(call(model, arguments), dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


def test_a_second_picture_of_the_same_number_begins_at_its_first_position():
    """Pipelines that give all references the same number start each at the same position."""
    family = FAMILIES["Flux2Transformer2DModel, two references"]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    arguments["img_ids"][64:, 0] = 1
    with apply_token_merging(model, ToMeConfig(ratio=0.5)).record() as recorded:
        call(model, arguments)
    assert {found.references for found in recorded.values()} == {((1, 8, 8), (1, 11, 8))}


def test_a_call_without_references_has_nothing_to_merge_where_only_they_would():
    model = model_of(FAMILIES[FLUX])
    apply_token_merging(model, ToMeConfig(**DENSE_TARGET))
    with pytest.raises(NothingToMergeError, match="there is none in the sequence; raise ratio"):
        call(model, FAMILIES[FLUX].inputs(1, 8, 8))


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": Correction(every=2)},
        {
            "rules": [
                {"until": 0.34, "ratio": 0, "reference_ratio": None},
                {"start": 0.67, "ratio": 0, "reference_ratio": None},
            ]
        },
    ],
)
def test_dense_steps_leave_the_references_dense(settings):
    """The first and the last of three steps are dense, by correction or by rules."""
    family = FAMILIES[KONTEXT]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    dense = call(model, arguments)
    handle = apply_token_merging(model, ToMeConfig(scope="block", **DENSE_TARGET, **settings))
    equal = []
    for step in range(3):
        handle.at_step(step, 3)
        equal.append(torch.equal(call(model, arguments), dense))
    assert equal == [True, False, True]


def test_a_model_that_takes_no_references_is_refused_at_once():
    model = model_of(FAMILIES["SD3Transformer2DModel"])
    with pytest.raises(NothingToMergeError, match=r"reference_ratio=0.75 merges reference images"):
        apply_token_merging(model, ToMeConfig(**DENSE_TARGET))


def test_references_are_let_go_with_their_call():
    """A call without references comes after one with them: each has its own grids."""
    model = model_of(FAMILIES[FLUX])
    alone = FAMILIES[FLUX].inputs(1, 8, 8)
    expected = planned_results(model, alone)
    apply_token_merging(model, ToMeConfig(ratio=0.5))
    call(model, FAMILIES[KONTEXT].inputs(1, 8, 8))
    assert torch.equal(call(model, alone), expected)


def planned_results(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    handle = apply_token_merging(model, ToMeConfig(ratio=0.5))
    result = call(model, arguments)
    handle.remove()
    return result


@pytest.mark.parametrize("name", [KONTEXT, JOY])
def test_the_report_counts_reference_pictures(name):
    model = model_of(FAMILIES[name])
    config = ToMeConfig(**DENSE_TARGET)
    report = predict(model, config, 16, 16, batch=1, references=[(16, 16)])
    assert {(row.tokens, row.merged_tokens) for row in report.rows} == {(128, 80)}
    assert "8 × 8 + 8 × 8" in str(report)
    assert report.flops_merged < report.flops_dense
    with pytest.raises(NothingToMergeError, match="there is none in the sequence"):
        predict(model, config, 16, 16, batch=1)


def test_the_handle_counts_the_references_of_the_last_run():
    family = FAMILIES[KONTEXT]
    model = model_of(family)
    handle = apply_token_merging(model, ToMeConfig(ratio=0.5))
    call(model, family.inputs(1, 8, 8))
    assert {row.references for row in handle.report().rows} == {((16, 8),)}
    assert {row.references for row in handle.report(16, 16).rows} == {()}


def test_references_that_a_model_does_not_take_are_no_part_of_a_report():
    with pytest.raises(ConfigError, match="SD3Transformer2DModel takes no reference images"):
        predict(model_of(FAMILIES["SD3Transformer2DModel"]), ToMeConfig(), references=[(16, 16)])
    with pytest.raises(ConfigError, match=r"references: expected \(height, width\)"):
        predict(model_of(FAMILIES[FLUX]), ToMeConfig(), references=[(16, 0)])
    with pytest.raises(UnsupportedModelError, match="images of the size of the sample, 16 × 16"):
        predict(model_of(FAMILIES[JOY]), ToMeConfig(), 16, 16, references=[(16, 8)])


@pytest.mark.slow
@torch.no_grad()
def test_a_model_compiled_as_a_whole_knows_the_pictures_of_its_last_call():
    torch._dynamo.reset()
    family = FAMILIES[KONTEXT]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    handle = apply_token_merging(model, ToMeConfig(ratio=0.25, reference_ratio=0.75))
    expected = call(model, arguments)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**arguments)[0], expected)
    handle.at_size(16, 16)  # one image of as many tokens as that being made
    with pytest.raises(torch._dynamo.exc.Unsupported, match="192 tokens are not the 8 × 8 given"):
        compiled(**arguments)
