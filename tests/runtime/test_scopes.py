"""Whole blocks, keys alone, proportional attention, held plans, correction."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import hosts
import pytest
import torch
from tests.models.family import deeper
from tests.models.test_every_family import EVERY, call, model_of, reordering, settings
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import (
    ConfigError,
    Correction,
    NothingToMergeError,
    PlanSharing,
    Schedule,
    StepReuse,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
    token_merging,
)
from tokenmerge.models.find import find_hosts
from tokenmerge.ops import make_plan, own_cell, strided_partition, unmerge
from tokenmerge.planners import PLANNERS
from tokenmerge.runtime.forward import COMBINE
from tokenmerge.runtime.state import Stack

HALF = {"ratio": 0.5}


def wide(family) -> bool:
    return any(block.block_layout for block in find_hosts(model_of(family))[0].blocks)


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
                ratio=0.6, planner="uniform", scope=scope, proportional=proportional, use_rand=False
            )
            patch = apply_token_merging(unet, config)
            state = first.module.__dict__["_tokenmerge"]
            state.grid.value.shape = 1, 16, 16
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
        patched.setitem(PLANNERS, "uniform", lambda *_: plan)
        return module(tokens, encoder_hidden_states=text)


def in_stacks(model: nn.Module) -> bool:
    return any(block.block_layout and block.stack for block in find_hosts(model)[0].blocks)


STACK = {"scope": "stack", "proportional": True}


@EVERY
def test_reordering_tokens_around_stacks_changes_nothing(family, monkeypatch):
    """Each token must keep its own position, mask and condition in all blocks, and get its own change."""
    model, arguments = deeper(model_of(family)), family.inputs(2, 8, 8)
    if not in_stacks(model):
        with pytest.raises(NothingToMergeError, match="scope='stack'"):
            apply_token_merging(model, settings(family, scope="stack"))
        return
    dense = call(model, arguments)
    monkeypatch.setitem(PLANNERS, "tome", reordering)
    apply_token_merging(model, settings(family, **STACK))
    assert_close(call(model, arguments), dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@EVERY
def test_a_stack_plans_once_and_the_blocks_within_it_return_merged_tokens(family, monkeypatch):
    model, arguments = deeper(model_of(family)), family.inputs(2, 8, 8)
    if not in_stacks(model):
        pytest.skip("its blocks are in no stack")
    plans, returned, stacks = [], {}, {}
    plan_of = PLANNERS["tome"]
    monkeypatch.setitem(PLANNERS, "tome", lambda *given: plans.append(plan_of(*given)) or plans[-1])
    for block in find_hosts(model)[0].blocks:
        if block.stack:
            stacks.setdefault(block.stack, []).append(block.path)
        returned[block.path] = []
        block.module.register_forward_hook(lambda m, a, y, to=returned[block.path]: to.append(longest(y)))
    dense = call(model, arguments)
    whole = {path: lengths.copy() for path, lengths in returned.items()}
    for lengths in returned.values():
        lengths.clear()
    patch = apply_token_merging(model, settings(family, **STACK))
    with patch.record() as recorded:
        merged = call(model, arguments)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)
    merging = [paths for paths in stacks.values() if paths[0] in recorded]
    pictures = {first: 1 + len(recorded[first].references) for first, *_ in merging}
    assert len(plans) == sum(len(returned[first]) * planned for first, planned in pictures.items()) > 0
    for *within, last in merging:
        assert returned[last] == whole[last]
        for path in within:
            assert all(now < before for now, before in zip(returned[path], whole[path], strict=True))
    patch.remove()
    assert torch.equal(call(model, arguments), dense)


def longest(result: Tensor | tuple) -> int:
    """Tokens of the image, of which there are more than words."""
    return max(x.shape[1] for x in ((result,) if isinstance(result, Tensor) else result) if x is not None)


@pytest.mark.parametrize("combine", ["mean", "keep", "norm"])
@pytest.mark.parametrize("scope", ["stack", "block"])
def test_a_stack_is_merged_once_as_are_blocks_with_one_plan(scope, combine, monkeypatch):
    """As a block's change is unmerged alone, merging again behind it gives what it left."""
    if (scope, combine) == ("block", "norm"):
        pytest.skip("not linear: merging what was unmerged does not give it back")
    plans = []
    plan_of = PLANNERS["tome"]
    monkeypatch.setitem(PLANNERS, "tome", lambda *given: plans.append(plan_of(*given)) or plans[-1])
    unet, arguments = hosts.sdxl(), hosts.inputs()
    conditions = {"text_embeds": torch.randn(2, hosts.TEXT), "time_ids": torch.randn(2, 6)}
    first, second = unet.down_blocks[1].attentions[0].transformer_blocks
    seen = []
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    second.register_forward_hook(lambda module, args, result: seen.append(result))
    sharing = {"plans": PlanSharing(blocks=True)} if scope == "block" else {}
    config = ToMeConfig(**HALF, max_downsample=2, scope=scope, combine=combine, **sharing)
    with torch.no_grad():
        patch = apply_token_merging(unet, config)
        unet(**arguments, added_cond_kwargs=conditions)
        patch.remove()
        assert len(plans) == (3 if scope == "block" else 4)  # down, in the middle, up, and up again
        (plan, *_), (x, stacked) = plans, seen
        merged = COMBINE[combine](plan, x)
        text = arguments["encoder_hidden_states"]
        result = merged
        for block in (first, second):
            result = block(result, encoder_hidden_states=text)
    assert_close(stacked, x + unmerge(plan, result - merged), rtol=1e-5, atol=1e-5)


def test_a_transformer_s_first_and_last_block_are_in_no_stack():
    from tests.models.tiny import FAMILIES

    model = deeper(model_of(FAMILIES["FluxTransformer2DModel"]))
    assert {block.stack: block.path for block in find_hosts(model)[0].blocks if block.stack} == {
        "transformer_blocks": "transformer_blocks.3",
        "single_transformer_blocks": "single_transformer_blocks.2",
    }
    report = apply_token_merging(model, ToMeConfig(scope="stack")).report()
    paths = [f"transformer_blocks.{i}" for i in (1, 2, 3)]
    paths += [f"single_transformer_blocks.{i}" for i in (0, 1, 2)]
    assert [(row.path, row.merged) for row in report.rows] == [(path, "stack") for path in paths]
    assert (
        "2 blocks stay dense: they are in no stack, like a transformer's first and last one" in report.notes
    )


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("FluxTransformer2DModel", "controlnet_block_samples"),
        ("FluxTransformer2DModel", "controlnet_single_block_samples"),
        ("SD3Transformer2DModel", "block_controlnet_hidden_states"),
        ("SD3Transformer2DModel", "skip_layers"),
    ],
)
def test_what_comes_between_blocks_is_refused_in_a_stack(family, given):
    from tests.models.tiny import FAMILIES

    model, arguments = deeper(model_of(FAMILIES[family])), FAMILIES[family].inputs(2, 8, 8)
    patch = apply_token_merging(model, ToMeConfig(scope="stack"))
    with pytest.raises(UnsupportedModelError, match=f"scope='stack' leaves .* and {given} needs"):
        call(model, {**arguments, given: [0]})
    patch.remove()


def test_gradients_flow_through_a_stack_and_checkpointing_is_refused():
    unet = hosts.sdxl()
    apply_token_merging(unet, ToMeConfig(**HALF, max_downsample=2, scope="stack"))
    unet(**hosts.sdxl_inputs()).sample.sum().backward()
    weight = unet.down_blocks[1].attentions[0].transformer_blocks[1].attn1.to_q.weight
    assert weight.grad.abs().max() > 0
    unet.enable_gradient_checkpointing()
    with pytest.raises(UnsupportedModelError, match="gradient checkpointing needs each block on its own"):
        unet(**hosts.sdxl_inputs())
    hosts.call(unet, **hosts.sdxl_inputs())  # without gradients there is none


def test_a_call_that_breaks_off_within_a_stack_leaves_nothing_for_the_next():
    unet = hosts.sdxl()
    second = unet.down_blocks[1].attentions[0].transformer_blocks[1]
    patch = apply_token_merging(unet, ToMeConfig(**HALF, max_downsample=2, scope="stack"))
    arguments = hosts.sdxl_inputs()  # what is kept goes with them
    before = hosts.call(unet, **arguments)

    def break_off() -> Stack:
        with pytest.raises(KeyboardInterrupt):
            hosts.call(unet, **arguments)
        stack = second.__dict__["_tokenmerge"].stack.threads.value
        assert stack.input is not None
        return stack

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    handle = second.register_forward_pre_hook(interrupt)
    break_off()
    assert copy.deepcopy(second).__dict__["_tokenmerge"].stack.threads.value.input is None
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedModelError, match=r"blocks\.1: expected the 32 merged tokens"),
    ):
        type(second).forward(second, torch.zeros(2, 256, 64))
    handle.remove()
    assert torch.equal(hosts.call(unet, **arguments), before)
    handle = second.register_forward_pre_hook(interrupt)
    stack = break_off()
    patch.remove()
    assert stack.input is None


def test_blocks_of_a_stack_compile_into_one_graph_each_and_their_first_and_last_into_others():
    torch._dynamo.reset()
    unet = hosts.sdxl(layers=5)
    apply_token_merging(unet, ToMeConfig(**HALF, **STACK, max_downsample=2))
    merged = hosts.call(unet, **hosts.sdxl_inputs())
    compiled = []

    unet.compile_repeated_blocks(fullgraph=True, backend=hosts.counting(compiled))
    assert_close(hosts.call(unet, **hosts.sdxl_inputs()), merged)
    assert len(compiled) == 3


def test_stacks_and_other_scopes_take_turns_over_the_steps():
    """As if each step's scope were that of all."""
    unet, alone = hosts.sdxl(), {}
    for scope in ("stack", "layers", "block"):
        with token_merging(unet, ToMeConfig(**HALF, max_downsample=2, scope=scope)):
            alone[scope] = hosts.call(unet, **hosts.sdxl_inputs())
    phases = {0.34: {"scope": "stack"}, 0.67: {"scope": "block"}}
    with token_merging(unet, ToMeConfig(**HALF, max_downsample=2, schedule=Schedule(phases=phases))) as patch:
        for step, scope in enumerate(("layers", "stack", "block")):
            patch.at_step(step, 3)
            assert torch.equal(hosts.call(unet, **hosts.sdxl_inputs()), alone[scope])


def test_a_controlnet_that_adds_between_the_blocks_of_a_stack_is_refused_before_anything_changes():
    from tests.models.tiny import FAMILIES

    def pipe(*names: str) -> SimpleNamespace:
        models = [deeper(model_of(FAMILIES[name])) for name in names]
        return SimpleNamespace(**dict(zip(("transformer", "controlnet"), models, strict=False)))

    together = pipe("FluxTransformer2DModel", "FluxControlNetModel")
    with pytest.raises(UnsupportedModelError, match="the ControlNet adds to them there"):
        apply_token_merging(together, ToMeConfig(scope="stack"))
    apply_token_merging(pipe("FluxTransformer2DModel"), ToMeConfig(scope="stack"))
    # Between the blocks of a UNet it adds nothing, and its own run on every step.
    unet = SimpleNamespace(unet=hosts.unet(), controlnet=hosts.controlnet())
    apply_token_merging(unet, ToMeConfig(scope="stack", reuse=StepReuse(every=2)))


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_steps_skip_stacks_and_the_blocks_around_them(name):
    """With changes that are the same in each step the result is, too, and no block runs for it."""
    from tests.models.tiny import FAMILIES

    model, ran = deeper(model_of(FAMILIES[name])), []
    arguments = FAMILIES[name].inputs(2, 8, 8)
    settings = {"scope": "stack", "reuse": StepReuse(every=3), "use_rand": False}
    patch = apply_token_merging(model, ToMeConfig(**HALF, **settings))
    model.transformer_blocks[1].attn.register_forward_hook(lambda *_: ran.append(index))
    results = []
    for index in range(6):
        patch.at_step(index, 6)
        sample = arguments["hidden_states"].clone()
        results.append(hosts.call(model, **{**arguments, "hidden_states": sample}))
    assert ran == list(StepReuse(every=3).steps_of(6).full)
    assert len(ran) < 6
    for result in results[1:]:
        assert_close(result, results[0], rtol=1e-4, atol=1e-5 * results[0].abs().max().item())


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


@pytest.mark.parametrize(
    "settings", [{"scope": "block"}, {"scope": "stack"}, {"proportional": True}, {"planner": "local"}]
)
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
    for combine in ("mean", "keep", "norm"):
        unet = hosts.unet()
        apply_token_merging(unet, ToMeConfig(**HALF, combine=combine))
        results[combine] = hosts.call(unet, **hosts.inputs())
    assert not torch.equal(results["mean"], results["keep"])
    assert not torch.equal(results["mean"], results["norm"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "list"}, "scope: expected one of 'layers', 'block', 'stack', 'keys', got 'list'"),
        (
            {"scope": "stack", "correction": Correction(every=2)},
            "correction.every=2: with scope='stack' no block alone",
        ),
        (
            {"levels": {1: {"scope": "stack"}}, "correction": Correction(every=2)},
            "correction.every=2: with scope='stack'",
        ),
        ({"combine": "max"}, "combine: expected one of 'mean', 'keep', 'norm', 'reuse', .*, got 'max'"),
        ({"planner": "best"}, "planner: expected one of .*'local', .*'toma', 'tome'.*, got 'best'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        ToMeConfig(**settings)
