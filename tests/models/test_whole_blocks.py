"""Blocks that run on merged tokens as a whole: every argument and every result follows the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.family import WORDS, Family, noise
from tests.models.test_every_family import call, model_of, reordering, settings
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing import assert_close

from tokenmerge import NothingToMergeError, StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.models.base import Block, TokenArgument
from tokenmerge.models.call import HostCall
from tokenmerge.models.find import find_hosts
from tokenmerge.ops.plan import Plan, make_plan
from tokenmerge.planners import PLANNERS
from tokenmerge.runtime.blocks.merged_call import combined, merged_call

# The MLPs of Sana and SANA-Video convolve the whole token grid. A block that replaces tokens counts those of
# the first frame.
NEED_THE_GRID = (
    "SanaTransformer2DModel",
    "SanaControlNetModel",
    "SanaVideoTransformer3DModel",
    "HunyuanVideoTransformer3DModel from an image",
)
WHOLE = tuple(name for name in FAMILIES if name not in NEED_THE_GRID)


def blocks_of(family: Family) -> tuple[Block, ...]:
    return find_hosts(family.build())[0].blocks


@pytest.mark.parametrize("name", WHOLE)
def test_all_blocks_of_a_model_can_run_as_a_whole(name):
    assert all(block.block_layout is not None for block in blocks_of(FAMILIES[name]))


@pytest.mark.parametrize("name", NEED_THE_GRID)
def test_blocks_that_need_the_whole_grid_cannot_and_are_skipped_all_the_same(name):
    model = model_of(FAMILIES[name])
    assert find_hosts(model)[0].can_skip
    with pytest.raises(NothingToMergeError, match="scope='block'"):
        apply_token_merging(model, settings(FAMILIES[name], scope="block"))
    patch = apply_token_merging(model, ToMeConfig(ratio=0, reuse=StepReuse(every=2)))
    inner = {next(block.module.children()): block.path for block in find_hosts(model)[0].blocks}
    ran: dict[int, list[str]] = {}
    hook = register_module_forward_pre_hook(
        lambda module, _: ran[index].append(inner[module]) if module in inner else None
    )
    for index in range(4):
        ran[index] = []
        patch.at_step(index, 6)
        call(model, FAMILIES[name].inputs(2, 8, 8))
    hook.remove()
    assert set(ran[0]) == set(inner.values())
    assert ran[1] == ran[3] == ran[0]
    assert ran[2] == []


@pytest.mark.parametrize("grid", [(8, 8), (7, 5)])
@pytest.mark.parametrize("name", WHOLE)
def test_reordering_tokens_around_whole_blocks_changes_nothing(name, grid, monkeypatch):
    """Each token must keep its own position, mask and condition in all of the block."""
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, *family.fitting(grid))
    dense = call(model, arguments)
    monkeypatch.setitem(PLANNERS, "tome", reordering)
    apply_token_merging(model, settings(family, scope="block", proportional=True))
    assert_close(call(model, arguments), dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_run_on_half_of_the_tokens(name):
    """An argument that kept its entries for all tokens would not fit."""
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    apply_token_merging(model, settings(family, scope="block"))
    merged = call(model, arguments)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)


def pairs(features: Tensor) -> Plan:
    """A plan that merges every second token into the one before it."""
    b, n, _ = features.shape
    order = torch.arange(n // 2).expand(b, -1)
    return make_plan(torch.arange(1, n, 2), torch.arange(0, n, 2), order, order, n // 2)


def added_to_tokens() -> list[Any]:
    """The arguments that blocks add to their tokens or join with them, each with its block."""
    found: dict[tuple[str, str], tuple[Block, TokenArgument]] = {}
    for name in WHOLE:
        for block in blocks_of(FAMILIES[name]):
            layout = block.block_layout
            for argument in layout.token_arguments if layout is not None else ():
                if argument.combined:
                    found.setdefault((type(block.module).__name__, argument.name), (block, argument))
    return [pytest.param(*value, id=" ".join(key)) for key, value in found.items()]


@pytest.mark.parametrize("combine", ["mean", "keep"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("block", "argument"), added_to_tokens())
def test_what_is_added_to_the_tokens_merges_as_they_do(block, argument, batch, combine):
    tokens, added = noise(2, 12, 4), noise(2, 12, 5)[:batch]
    layout, given = block.block_layout, {}

    def method(**arguments: Tensor) -> Tensor:
        given.update(arguments)
        return arguments[place]

    place = layout.tokens or "hidden_states"
    call_of_block = HostCall(method, [place, argument.name], (), {place: tokens, argument.name: added})
    plan = pairs(tokens)
    merged_call(call_of_block, layout, plan, combine, change_only=True)
    assert_close(given[argument.name], combined(plan, added.expand(2, -1, -1), combine))
    assert not torch.equal(combined(plan, tokens, "mean"), combined(plan, tokens, "keep"))


def test_the_arguments_that_blocks_add_to_their_tokens_are_known():
    assert {param.id for param in added_to_tokens()} == {
        "HunyuanDiTBlock skip",
        "CosmosTransformerBlock extra_pos_emb",
        "CosmosTransformerBlock controlnet_residual",
        "WanVACETransformerBlock hidden_states",
    }


def test_what_a_control_block_returns_for_other_blocks_has_nothing_to_be_added_to():
    """Its tokens keep the detail of each, and what others add to theirs is that of the merged token."""
    block = blocks_of(FAMILIES["WanVACETransformer3DModel"])[0]
    tokens = noise(2, 12, 4)

    def method(control_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return control_hidden_states * 3, control_hidden_states + 1

    call_of_block = HostCall(method, ["control_hidden_states"], (tokens,), {})
    plan = pairs(tokens)
    hint, result = merged_call(call_of_block, block.block_layout, plan, "mean", change_only=True)
    assert_close(hint, plan.unmerge(3 * plan.merge(tokens)))
    assert_close(result, tokens + 1)


class Stop(Exception):
    pass


def attended(block: nn.Module, layer: str, *args: Any, **kwargs: Any) -> Tensor:
    """The tokens that a layer of a block is called with."""
    found: list[Tensor] = []

    def keep(module: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        found.append(given[0] if given else named["hidden_states"])
        raise Stop

    hook = getattr(block, layer).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad(), pytest.raises(Stop):
        block(*args, **kwargs)
    hook.remove()
    return found[0]


def is_among(tokens: Tensor, others: Tensor) -> Tensor:
    """For each of some tokens, whether it is one of the others, up to rounding."""
    distances = (tokens.unsqueeze(1) - others.unsqueeze(0)).norm(dim=-1)
    return (distances < 1e-4 * others.norm(dim=-1).max()).any(dim=1)


ROWS, COLUMNS = 7, 9
IMAGE = ROWS * COLUMNS


@pytest.mark.parametrize(
    ("name", "path", "layer", "first", "image"),
    [
        ("AuraFlowTransformer2DModel", "single_transformer_blocks.1", "attn", [WORDS + 8] * 2, IMAGE),
        # Texts of 7 and of 5 words, each followed by its image and then by padding.
        ("Lumina2Transformer2DModel", "layers.1", "attn", [WORDS, WORDS - 2], IMAGE),
        # Texts of one length need no mask.
        ("Lumina2Transformer2DModel without a mask", "layers.1", "attn", [WORDS] * 2, IMAGE),
        ("ZImageTransformer2DModel", "layers.1", "attention", [0, 0], IMAGE),
        ("Krea2Transformer2DModel", "transformer_blocks.1", "attn", [WORDS] * 2, IMAGE),
        ("Ideogram4Transformer2DModel", "layers.1", "attention", [WORDS] * 2, IMAGE),
        ("ErnieImageTransformer2DModel", "layers.1", "self_attention", [0, 0], IMAGE),
        ("HiDreamImageTransformer2DModel", "single_stream_blocks.1.block", "attn1", [0, 0], IMAGE),
        ("LTX2VideoTransformer3DModel with a keyframe", "transformer_blocks.1", "attn1", [0, 0], 3 * IMAGE),
        ("Flux2Transformer2DModel", "single_transformer_blocks.1", "attn", [WORDS] * 2, IMAGE),
        ("BriaFiboTransformer2DModel", "single_transformer_blocks.1", "attn", [WORDS] * 2, IMAGE),
        (
            "LTXVideoTransformer3DModel from an image",
            "transformer_blocks.1",
            "attn1",
            [IMAGE] * 2,
            3 * IMAGE,
        ),
    ],
)
def test_the_text_in_a_sequence_with_an_image_stays_as_it_is(name, path, layer, first, image):
    """A call of one block with the same sequence: of the text each token is there, and of the image half."""
    family = FAMILIES[name.removesuffix(" without a mask")]
    model, arguments = model_of(family), family.inputs(2, ROWS, COLUMNS)
    if name.endswith("without a mask"):
        arguments["encoder_attention_mask"] = torch.ones_like(arguments["encoder_attention_mask"])
    block = model.get_submodule(path)
    given: list[Any] = []
    hook = block.register_forward_pre_hook(lambda _, *all: given.append(all), with_kwargs=True)
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, scope="block"))
    call(model, arguments)
    hook.remove()
    (args, kwargs), *_ = given
    merged = attended(block, layer, *args, **kwargs)
    patch.remove()
    dense = attended(block, layer, *args, **kwargs)
    removed = dense.shape[1] - merged.shape[1]
    assert removed >= image // 2 - 3
    for one, other, start in zip(dense, merged, first, strict=True):
        assert is_among(torch.cat([one[:start], one[start + image :]]), other).all()
        assert not is_among(one[start : start + image], other).all()
