"""Whole blocks, keys alone, proportional attention, held plans, correction."""

from __future__ import annotations

import hosts
import pytest
import torch
from tests.models.test_every_family import DISTINCT, call, model_of, settings
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import (
    ConfigError,
    MergeSharing,
    NothingToMergeError,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
    token_merging,
)
from tokenmerge.models.find import find_hosts
from tokenmerge.ops.matching import own_cell
from tokenmerge.ops.partition import strided_partition
from tokenmerge.ops.plan import make_plan
from tokenmerge.planners import PLANNERS
from tokenmerge.runtime.blocks.merged_call import combined

HALF = {"ratio": 0.5}


def wide(family) -> bool:
    return any(block.block_layout for block in find_hosts(model_of(family))[0].blocks)


@DISTINCT
def test_whole_blocks_run_on_fewer_tokens_and_keep_the_detail_of_each(family):
    if not wide(family):
        model = model_of(family)
        with pytest.raises(NothingToMergeError, match="scope='block'"):
            apply_token_merging(model, settings(family, scope="block"))
        return
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    patch = apply_token_merging(model, settings(family, scope="block"))
    merged = call(model, arguments)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)
    patch.remove()
    assert torch.equal(call(model, arguments), dense)


@pytest.mark.parametrize("scope", ["layers", "block"])
def test_proportional_attention_is_exact_where_merged_tokens_are_equal(scope):
    """With every token of a cell alike, a merged one that counts for all of them stands for them."""
    unet = hosts.unet()
    host = find_hosts(unet)[0]
    first = host.blocks[0]
    tokens = torch.randn(2, 8, 8, 32).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    text = torch.randn(2, 7, hosts.TEXT)
    with torch.no_grad():
        dense = first.module(tokens, encoder_hidden_states=text)
        errors = {}
        for proportional in (False, True):
            config = ToMeConfig(
                ratio=0.6, planner="uniform", scope=scope, proportional=proportional, seed=None
            )
            patch = apply_token_merging(unet, config)
            state = first.module.__dict__["_tokenmerge"]
            state.grid.value.shapes = ((1, 16, 16),)
            merged = uneven(first.module, tokens, text)
            errors[proportional] = (merged - dense).abs().max().item()
            patch.remove()
    assert errors[True] < 1e-5 * dense.abs().max().item()
    assert errors[False] > 100 * errors[True]


def uneven(module: nn.Module, tokens: Tensor, text: Tensor) -> Tensor:
    """Call a block with a plan that merges the left half of the image only, so that sizes differ."""
    src, dst = strided_partition((16, 16), (2, 2))
    left = src % 16 < 8
    order = torch.cat([left.nonzero(), (~left).nonzero()]).flatten().expand(2, -1)
    plan = make_plan(src, dst, order, own_cell((16, 16), (2, 2), src).expand(2, -1), r=int(left.sum()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(PLANNERS, "uniform", lambda *_: plan)
        return module(tokens, encoder_hidden_states=text)


@pytest.mark.parametrize("combine", ["mean", "keep"])
def test_blocks_with_one_plan_are_merged_once(combine, monkeypatch):
    """As a block's change is unmerged alone, merging again behind it gives what it left."""
    plans = []
    plan_of = PLANNERS["tome"]
    monkeypatch.setitem(PLANNERS, "tome", lambda *given: plans.append(plan_of(*given)) or plans[-1])
    unet, arguments = hosts.sdxl(), hosts.inputs()
    conditions = {"text_embeds": torch.randn(2, hosts.TEXT), "time_ids": torch.randn(2, 6)}
    first, second = unet.down_blocks[1].attentions[0].transformer_blocks
    seen = []
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    second.register_forward_hook(lambda module, args, result: seen.append(result))
    sharing = MergeSharing(blocks=True)
    config = ToMeConfig(**HALF, max_downsample=2, scope="block", combine=combine, merge_sharing=sharing)
    with torch.no_grad():
        patch = apply_token_merging(unet, config)
        unet(**arguments, added_cond_kwargs=conditions)
        patch.remove()
        assert len(plans) == 3  # down, in the middle and up
        (plan, *_), (x, made) = plans, seen
        merged = combined(plan, x, combine)
        text = arguments["encoder_hidden_states"]
        result = merged
        for block in (first, second):
            result = block(result, encoder_hidden_states=text)
    assert_close(made, x + plan.unmerge(result - merged), rtol=1e-5, atol=1e-5)


def test_scopes_take_turns_over_the_steps():
    """As if each step's scope were that of all."""
    unet, alone = hosts.sdxl(), {}
    for scope in ("layers", "block"):
        with token_merging(unet, ToMeConfig(**HALF, max_downsample=2, scope=scope)):
            alone[scope] = hosts.call(unet, **hosts.sdxl_inputs())
    rules = [{"start": 0.34, "scope": "block"}, {"start": 0.67, "scope": "layers"}]
    with token_merging(unet, ToMeConfig(**HALF, max_downsample=2, rules=rules)) as patch:
        for step, scope in enumerate(("layers", "block", "layers")):
            patch.at_step(step, 3)
            assert torch.equal(hosts.call(unet, **hosts.sdxl_inputs()), alone[scope])


def test_keys_alone_are_fewer_and_every_query_stays():
    unet = hosts.unet()
    seen: dict[str, set[int]] = {"to_q": set(), "to_k": set()}
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    for name, lengths in seen.items():
        getattr(attention, name).register_forward_hook(lambda m, a, y, to=lengths: to.add(a[0].shape[1]))
    dense = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.75, scope="keys", planner="uniform"))
    merged = hosts.call(unet, **hosts.inputs())
    assert seen == {"to_q": {256}, "to_k": {256, 64}}
    assert not torch.equal(merged, dense)


def test_keys_alone_need_an_argument_for_them():
    from tests.models.tiny import FAMILIES

    model = model_of(FAMILIES["FluxTransformer2DModel"])
    with pytest.raises(NothingToMergeError, match="scope='keys'"):
        apply_token_merging(model, ToMeConfig(scope="keys"))


def test_keys_alone_of_a_compvis_model():
    model = hosts.UNetModel().eval()
    arguments = hosts.compvis_inputs()
    with torch.no_grad():
        dense = model(*arguments)
        patch = apply_token_merging(model, ToMeConfig(ratio=0.75, scope="keys", planner="uniform"))
        merged = model(*arguments)
        patch.remove()
        assert not torch.equal(merged, dense)
        assert torch.equal(model(*arguments), dense)


def test_keys_alone_cannot_be_fused_with_the_queries():
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(scope="keys"))
    unet.fuse_qkv_projections()
    with pytest.raises(UnsupportedModelError, match="scope='keys' needs keys and values projected apart"):
        hosts.call(unet, **hosts.inputs())


def test_proportional_attention_needs_pytorch_s_own():
    from diffusers.models.attention_processor import AttnProcessor

    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(**HALF, proportional=True))
    hosts.call(unet, **hosts.inputs())
    unet.set_attn_processor(AttnProcessor())
    with pytest.raises(UnsupportedModelError, match="proportional=True needs attention by PyTorch"):
        hosts.call(unet, **hosts.inputs())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"scope": "block"}, {"proportional": True}, {"planner": "tiled"}])
def test_settings_beyond_the_paper_compile_into_one_graph(settings):
    torch._dynamo.reset()
    unet = hosts.unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
    )
    apply_token_merging(unet, ToMeConfig(**HALF, **settings))
    merged = hosts.call(unet, **hosts.inputs())
    compiled = torch.compile(unet, fullgraph=True, backend="eager")
    assert torch.equal(hosts.call(compiled, **hosts.inputs()), merged)


def test_every_way_to_combine_acts():
    results = {}
    for combine in ("mean", "keep"):
        unet = hosts.unet()
        apply_token_merging(unet, ToMeConfig(**HALF, combine=combine))
        results[combine] = hosts.call(unet, **hosts.inputs())
    assert not torch.equal(results["mean"], results["keep"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "list"}, "scope: expected one of 'layers', 'block', 'keys', got 'list'"),
        ({"combine": "max"}, "combine: expected one of 'mean', 'keep', got 'max'"),
        ({"planner": "best"}, "planner: expected one of .*'importance', .*'toma', 'tome'.*, got 'best'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        ToMeConfig(**settings)
