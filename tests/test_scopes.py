"""Whole blocks, keys alone, proportional attention, held plans, correction."""

from __future__ import annotations

import hosts
import pytest
import torch
from families.test_every_family import EVERY, call, model_of, reordering, settings
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import ConfigError, NothingToMergeError, ToMeConfig, apply_token_merging
from tokenmerge.methods import PLANNERS
from tokenmerge.models import find_hosts
from tokenmerge.ops import make_plan, own_cell, strided_partition

HALF = {"ratio": 0.5}


def wide(family) -> bool:
    return any(block.wide for block in find_hosts(model_of(family))[0].blocks)


@EVERY
def test_reordering_tokens_around_whole_blocks_changes_nothing(family, monkeypatch):
    """Each token must keep its own position, mask and condition in all of the block."""
    if not wide(family):
        pytest.skip("its blocks do not run on merged tokens as a whole")
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    monkeypatch.setitem(PLANNERS, "tome", reordering)
    apply_token_merging(model, settings(family, scope="block", proportional=True))
    assert_close(call(model, arguments), dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@EVERY
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
                ratio=0.6, planner="grid", scope=scope, proportional=proportional, use_rand=False
            )
            patch = apply_token_merging(unet, config)
            state = first.module.__dict__["_tokenmerge"]
            state.grid.frames, state.grid.rows, state.grid.columns = 1, 16, 16
            merged = uneven(first.module, tokens, text)
            errors[proportional] = (merged - dense).abs().max().item()
            patch.remove()
    assert errors[True] < 1e-5 * dense.abs().max().item()
    assert errors[False] > 100 * errors[True]


def uneven(module: nn.Module, tokens: Tensor, text: Tensor) -> Tensor:
    """Call a block with a plan that merges the left half of the picture only, so that sizes differ."""
    src, dst = strided_partition((16, 16), (2, 2))
    left = src % 16 < 8
    order = torch.cat([left.nonzero(), (~left).nonzero()]).flatten().expand(2, -1)
    plan = make_plan(src, dst, order, own_cell((16, 16), (2, 2), src).expand(2, -1), r=int(left.sum()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(PLANNERS, "grid", lambda *_: plan)
        return module(tokens, encoder_hidden_states=text)


def test_keys_alone_are_fewer_and_every_query_stays():
    unet = hosts.unet()
    seen: dict[str, set[int]] = {"to_q": set(), "to_k": set()}
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    for name, lengths in seen.items():
        getattr(attention, name).register_forward_hook(lambda m, a, y, to=lengths: to.add(a[0].shape[1]))
    dense = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.75, scope="keys", planner="grid"))
    merged = hosts.call(unet, **hosts.inputs())
    assert seen == {"to_q": {256}, "to_k": {256, 64}}
    assert not torch.equal(merged, dense)


def test_keys_alone_need_an_argument_for_them():
    from families.tiny import FAMILIES

    model = model_of(FAMILIES["FluxTransformer2DModel"])
    with pytest.raises(NothingToMergeError, match="scope='keys'"):
        apply_token_merging(model, ToMeConfig(scope="keys"))


def plans_made(monkeypatch) -> list[int]:
    made: list[int] = []
    plan = PLANNERS["tome"]

    def count(features: Tensor, *rest: object) -> object:
        made.append(features.shape[1])
        return plan(features, *rest)

    monkeypatch.setitem(PLANNERS, "tome", count)
    return made


def test_blocks_of_a_level_share_a_plan(monkeypatch):
    unet = hosts.unet()
    made = plans_made(monkeypatch)
    apply_token_merging(unet, ToMeConfig(**HALF, max_downsample=2))
    hosts.call(unet, **hosts.inputs())
    assert sorted(set(made)) == [64, 256]
    alone = len(made)
    made.clear()
    apply_token_merging(unet, ToMeConfig(**HALF, max_downsample=2, share_plan=True))
    hosts.call(unet, **hosts.inputs())
    assert alone == 7
    assert sorted(made) == [64, 256]
    hosts.call(unet, **{**hosts.inputs(), "timestep": torch.tensor(400)})
    assert len(made) == 4, "a plan does not outlive its step"


def test_the_halves_of_guidance_share_a_plan_and_other_images_do_not():
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(**HALF))
    arguments = hosts.inputs(4)
    guided = {**arguments, "sample": arguments["sample"][:2].repeat(2, 1, 1, 1)}
    for case, shared in ((arguments, False), (guided, True)):
        with patch.record() as plans:
            hosts.call(unet, **case)
        # Behind the first block the halves differ by their prompts, and so would plans of their own.
        plan = list(plans.values())[-1].plan
        assert torch.equal(plan.labels()[:2], plan.labels()[2:]) == shared
        assert not torch.equal(plan.labels()[0], plan.labels()[1])


def test_guidance_need_not_share_a_plan():
    unet = hosts.unet()
    arguments = hosts.inputs(2)
    guided = {**arguments, "sample": arguments["sample"][:1].repeat(2, 1, 1, 1)}
    patch = apply_token_merging(unet, ToMeConfig(**HALF, share_guidance=False))
    with patch.record() as plans:
        hosts.call(unet, **guided)
    plan = list(plans.values())[-1].plan
    assert not torch.equal(plan.labels()[0], plan.labels()[1])


def test_plans_are_held_for_some_steps_and_dropped_with_the_generation(monkeypatch):
    unet = hosts.unet()
    made = plans_made(monkeypatch)
    patch = apply_token_merging(unet, ToMeConfig(**HALF, plan_every=2, share_plan=True))
    for _ in range(2):
        made.clear()
        with patch.generation(steps=3):
            for timestep in (900, 600, 300):
                hosts.call(unet, **{**hosts.inputs(), "timestep": torch.tensor(timestep)})
        assert len(made) == 2


@pytest.mark.parametrize("batches", [(2, 3), (3, 2)])
def test_a_held_plan_is_dropped_when_the_batch_changes(batches):
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(**HALF, plan_every=4))
    with patch.generation(steps=2):
        for batch, timestep in zip(batches, (900, 600), strict=True):
            merged = hosts.call(unet, **{**hosts.inputs(batch), "timestep": torch.tensor(timestep)})
            assert torch.isfinite(merged).all()


def test_until_leaves_the_last_steps_bit_equal_to_dense():
    unet = hosts.unet()
    late = {**hosts.inputs(), "timestep": torch.tensor(100)}
    dense = hosts.call(unet, **late)
    patch = apply_token_merging(unet, ToMeConfig(**HALF, until=0.5, scope="block"))
    with patch.generation(steps=2):
        assert not torch.equal(hosts.call(unet, **{**late, "timestep": torch.tensor(900)}), dense)
        assert torch.equal(hosts.call(unet, **late), dense)


def test_a_correcting_step_is_dense_and_the_next_is_closer_for_it():
    unet = hosts.unet()

    def error(**changes: object) -> float:
        """Of the second of two steps at nearly the same sample."""
        second = {**hosts.inputs(), "timestep": torch.tensor(880)}
        second["sample"] = second["sample"] * 0.98
        dense = hosts.call(unet, **second)
        patch = apply_token_merging(unet, ToMeConfig(**HALF, scope="block", max_downsample=2, **changes))
        with patch.generation(steps=2):
            first = {**hosts.inputs(), "timestep": torch.tensor(900)}
            if changes:
                merged = hosts.call(unet, **first)
                patch_free = hosts.unet()
                assert torch.equal(merged, hosts.call(patch_free, **first))
            else:
                hosts.call(unet, **first)
            result = hosts.call(unet, **second)
        patch.remove()
        return ((result - dense).norm() / dense.norm()).item()

    assert error(correct_every=2) < error()


def test_every_way_to_combine_acts():
    results = {}
    for combine in ("mean", "keep", "norm"):
        unet = hosts.unet()
        apply_token_merging(unet, ToMeConfig(**HALF, combine=combine))
        results[combine] = hosts.call(unet, **hosts.inputs())
    assert not torch.equal(results["mean"], results["keep"])
    assert not torch.equal(results["mean"], results["norm"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "stack"}, "scope: expected one of 'layers', 'block', 'keys', got 'stack'"),
        ({"combine": "max"}, "combine: expected one of 'mean', 'keep', 'norm', got 'max'"),
        ({"planner": "best"}, "planner: expected one of 'tome', 'local', 'grid', got 'best'"),
        ({"until": 0}, "until: expected 0 < until ≤ 1, got 0"),
        ({"plan_every": 0}, "plan_every: expected an integer ≥ 1, got 0"),
        ({"correct_every": 1}, "correct_every: 1 would run every step dense"),
        ({"correct_every": 3, "scope": "keys"}, "there is nothing to correct"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        ToMeConfig(**settings)
