"""What a patched model does, and that nothing of it stays."""

import copy
import pickle
import warnings
from collections.abc import Callable

import hosts
import pytest
import torch
from accelerate.hooks import ModelHook as AccelerateHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

from tokenmerge import (
    NothingToMergeError,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
    remove_token_merging,
    token_merging,
)
from tokenmerge.runtime.memory.state import BlockState

EVERYTHING = {"max_downsample": 2, "merge_crossattn": True, "merge_mlp": True}


def state(model: nn.Module) -> dict[str, tuple]:
    """All that patching could leave on a model."""
    return {
        name: (type(m), set(m.__dict__), list(m._forward_hooks), list(m._forward_pre_hooks))
        for name, m in model.named_modules()
    }


def tokens_seen(model: nn.Module, **arguments: object) -> dict[str, int]:
    """Tokens that the query projection of each attention layer, or the feed-forward layer, receives."""
    seen: dict[str, int] = {}

    def see(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            seen[name] = args[0].shape[1]

        return hook

    handles = [
        m.register_forward_hook(see(name))
        for name, m in model.named_modules()
        if name.endswith(("attn1.to_q", "attn2.to_q", "ff.net.0"))
    ]
    hosts.call(model, **arguments)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["attn", "everything"])
def test_ratio_0_is_bit_equal(settings):
    unet = hosts.unet()
    dense = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0, **settings))
    assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)


def test_merging_changes_the_output_and_keeps_it_finite():
    unet = hosts.unet()
    dense = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    merged = hosts.call(unet, **hosts.inputs())
    assert merged.isfinite().all()
    assert not torch.equal(merged, dense)


def test_attention_receives_fewer_tokens_at_the_top_level_only():
    unet = hosts.unet()
    before = tokens_seen(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    after = tokens_seen(unet, **hosts.inputs())
    for name in before:
        merges = name.endswith("attn1.to_q") and before[name] == 256
        assert after[name] == (128 if merges else before[name])
    assert 128 in after.values()


def test_all_layers_of_all_levels_receive_fewer_tokens_when_asked():
    unet = hosts.unet()
    before = tokens_seen(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.75, **EVERYTHING))
    assert tokens_seen(unet, **hosts.inputs()) == {name: n // 4 for name, n in before.items()}


def test_attention_gets_the_mask_of_the_tokens_that_stay():
    """What the attention processor receives is what the plan says."""
    unet = hosts.unet()
    seen = []

    class Sees(AttnProcessor2_0):
        def __call__(self, attn: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            seen.append(kwargs.get("attention_mask"))
            return super().__call__(attn, hidden_states, **kwargs)

    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    block.attn1.set_processor(Sees())
    mask = torch.randn(2, 256).sign().clamp(max=0).unsqueeze(1) * 10000
    with token_merging(unet, ToMeConfig(ratio=0.5)) as patch, patch.record() as plans, torch.no_grad():
        unet.down_blocks[0].attentions[0](
            torch.randn(2, 32, 16, 16),
            encoder_hidden_states=hosts.inputs()["encoder_hidden_states"],
            attention_mask=mask,
            return_dict=False,
        )
    plan = plans["down_blocks.0.attentions.0.transformer_blocks.0"].plan
    expected = torch.stack([mask[i, :, plan.kept()[i]] for i in range(2)])
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)


def test_masks_of_an_ip_adapter_are_for_the_full_grid_and_keep_the_layer_dense():
    unet = hosts.unet()
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    received = []
    block.attn2.register_forward_hook(
        lambda module, args, kwargs, out: received.append(out), with_kwargs=True
    )
    block.attn2.to_q.register_forward_hook(lambda module, args, out: received.append(args[0].shape[1]))
    text = hosts.inputs()["encoder_hidden_states"]
    apply_token_merging(unet, ToMeConfig(ratio=0.5, merge_crossattn=True))
    for masks, tokens in ((None, 128), ([torch.ones(1)], 256)):
        received.clear()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plain processor says that it ignores the masks
            unet.down_blocks[0].attentions[0](
                torch.randn(2, 32, 16, 16),
                encoder_hidden_states=text,
                cross_attention_kwargs={"ip_adapter_masks": masks} if masks else None,
                return_dict=False,
            )
        assert received[0] == tokens


@pytest.mark.parametrize("size", [(16, 16), (17, 13), (9, 24), (6, 40)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_any_size_and_batch_by_keyword_or_position(size, batch):
    unet = hosts.unet()
    inputs = hosts.inputs(batch, *size)
    apply_token_merging(unet, ToMeConfig(ratio=0.5, **EVERYTHING))
    by_keyword = hosts.call(unet, **inputs)
    with torch.no_grad():
        by_position = unet(*inputs.values()).sample
    assert by_keyword.shape == inputs["sample"].shape
    assert by_keyword.isfinite().all()
    assert torch.equal(by_keyword, by_position)


def test_an_image_does_not_depend_on_its_batch():
    """Its plan is its own, and the random draw is that of the seed and the timestep.

    Sums in a larger batch may be taken in another order: the dense model shows how much that matters, and
    merged rows may differ by as much again in each of the layers that follow.
    """
    unet = hosts.unet()
    alone, three = hosts.inputs(1), hosts.inputs(3)
    dense_rounding = (hosts.call(unet, **three)[:1] - hosts.call(unet, **alone)).abs().max()
    with token_merging(unet, ToMeConfig(ratio=0.5)):
        first_of_three = hosts.call(unet, **three)[:1]
        last = hosts.call(unet, **{k: v.flip(0) if v.ndim else v for k, v in three.items()})[2:]
        torch.testing.assert_close(
            first_of_three, hosts.call(unet, **alone), atol=10 * dense_rounding + 1e-6, rtol=0
        )
        torch.testing.assert_close(last, hosts.call(unet, **alone), atol=10 * dense_rounding + 1e-6, rtol=0)


def test_same_seed_and_timestep_same_output_and_the_global_generator_is_not_drawn_from():
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    before = torch.random.get_rng_state()
    first, again = (hosts.call(unet, **hosts.inputs()) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("changed", ["timestep", "seed"])
def test_timestep_and_seed_change_the_draw(changed):
    """The timestep reaches the output by another way too, so the plans are compared."""
    unet = hosts.unet()
    plans = []
    for value in (500, 501):
        config = ToMeConfig(ratio=0.5, seed=value if changed == "seed" else 0)
        timestep = torch.tensor(value if changed == "timestep" else 500)
        with token_merging(unet, config) as patch, patch.record() as recorded:
            hosts.call(unet, **{**hosts.inputs(), "timestep": timestep})
        plans.append(recorded["down_blocks.0.attentions.0.transformer_blocks.0"].plan.keep)
    destinations = [plan[:, -64:] for plan in plans]  # one in each of 8 × 8 cells, after the sources
    assert not torch.equal(*destinations)


@pytest.mark.parametrize("timestep", [500, 500.0, torch.tensor(500), torch.tensor([500, 500])])
def test_the_timestep_may_be_a_number_or_a_tensor(timestep):
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    expected = hosts.call(unet, **hosts.inputs())
    assert torch.equal(hosts.call(unet, **{**hosts.inputs(), "timestep": timestep}), expected)


def test_removal_leaves_nothing():
    unet = hosts.unet()
    before, dense = state(unet), hosts.call(unet, **hosts.inputs())
    patch = apply_token_merging(unet, ToMeConfig(ratio=0.5, **EVERYTHING))
    assert state(unet) != before
    hosts.call(unet, **hosts.inputs())
    patch.remove()
    assert state(unet) == before
    assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)
    patch.remove()
    remove_token_merging(unet)
    assert state(unet) == before


def test_removal_after_an_exception_in_the_middle_of_a_step():
    unet = hosts.unet()
    before, dense = state(unet), hosts.call(unet, **hosts.inputs())
    failing = unet.up_blocks[1].attentions[1].transformer_blocks[0].attn1.to_v
    with token_merging(unet, ToMeConfig(ratio=0.5)):
        handle = failing.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hosts.call(unet, **hosts.inputs())
        handle.remove()
    assert state(unet) == before
    assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)


def test_a_step_after_an_exception_is_as_before():
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    merged = hosts.call(unet, **hosts.inputs())
    handle = unet.mid_block.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hosts.call(unet, **hosts.inputs())
    handle.remove()
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)


@pytest.mark.parametrize("fails", [False, True])
def test_no_plan_outlives_its_block(fails):
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    if fails:
        block = unet.up_blocks[1].attentions[1].transformer_blocks[0]
        block.ff.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hosts.call(unet, **hosts.inputs())
    else:
        hosts.call(unet, **hosts.inputs())
    states = [m.__dict__["_tokenmerge"] for m in unet.modules() if "_tokenmerge" in m.__dict__]
    merges = [state.threads.value.running for state in states if isinstance(state, BlockState)]
    assert merges == [None] * 3  # one for each block


def test_applying_twice_is_the_second_alone():
    unet, other = hosts.unet(), hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.25, **EVERYTHING))
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    apply_token_merging(other, ToMeConfig(ratio=0.5))
    assert {n: set(m.__dict__) for n, m in unet.named_modules()} == {
        n: set(m.__dict__) for n, m in other.named_modules()
    }
    assert torch.equal(hosts.call(unet, **hosts.inputs()), hosts.call(other, **hosts.inputs()))


def test_two_models_do_not_know_of_each_other():
    merged, dense = hosts.unet(), hosts.unet()
    expected = hosts.call(dense, **hosts.inputs())
    apply_token_merging(merged, ToMeConfig(ratio=0.5))
    assert torch.equal(hosts.call(dense, **hosts.inputs()), expected)
    attention = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    assert type(merged.get_submodule(attention)) is not type(dense.get_submodule(attention))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_merges_too_and_is_restored_alone(make_copy):
    unet = hosts.unet()
    before, dense = state(unet), hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    merged = hosts.call(unet, **hosts.inputs())
    copied = make_copy(unet)
    assert torch.equal(hosts.call(copied, **hosts.inputs()), merged)
    remove_token_merging(copied)
    assert state(copied) == before
    assert torch.equal(hosts.call(copied, **hosts.inputs()), dense)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)


def test_saving_a_patched_model_saves_the_plain_one(tmp_path):
    unet = hosts.unet()
    dense = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    unet.save_pretrained(tmp_path)
    remove_token_merging(unet)
    loaded = type(unet).from_pretrained(tmp_path).eval()
    assert type(loaded) is type(unet)
    assert torch.equal(hosts.call(loaded, **hosts.inputs()), dense)


def gradients(model: nn.Module, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    call().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["attn", "everything"])
def test_gradients_are_those_without_checkpointing(settings):
    unet = hosts.unet().train()
    apply_token_merging(unet, ToMeConfig(ratio=0.5, **settings))
    plain = gradients(unet, lambda: unet(**hosts.inputs()).sample)
    unet.enable_gradient_checkpointing()
    checkpointed = gradients(unet, lambda: unet(**hosts.inputs()).sample)
    assert len(plain) == len(list(unet.parameters()))
    for a, b in zip(plain, checkpointed, strict=True):
        assert torch.equal(a, b)


def test_gligen_keeps_its_effect():
    unet = hosts.unet(attention_type="gated")
    for module in unet.modules():
        if type(module).__name__ == "GatedSelfAttentionDense":
            module.alpha_attn.data.fill_(1)
            module.alpha_dense.data.fill_(1)
    objects = {"objs": torch.randn(2, 3, hosts.TEXT)}
    text = hosts.inputs()
    gligen = {"boxes": torch.rand(2, 3, 4), "positive_embeddings": objects["objs"], "masks": torch.ones(2, 3)}
    unet.position_net.register_forward_hook(lambda *_: objects["objs"])
    grounded = hosts.call(unet, **text, cross_attention_kwargs={"gligen": dict(gligen)})
    assert not torch.allclose(grounded, hosts.call(unet, **text))
    with token_merging(unet, ToMeConfig(ratio=0)):
        assert torch.equal(
            hosts.call(unet, **text, cross_attention_kwargs={"gligen": dict(gligen)}), grounded
        )
    with token_merging(unet, ToMeConfig(ratio=0.5)):
        merged = hosts.call(unet, **text, cross_attention_kwargs={"gligen": dict(gligen)})
        assert not torch.allclose(merged, hosts.call(unet, **text))


def test_feed_forward_in_chunks_stays_dense_and_chunked_and_alone_is_an_error():
    unet = hosts.unet()
    for module in unet.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.set_chunk_feed_forward(64, dim=1)
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    merged = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.5, merge_mlp=True))
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)
    with pytest.raises(NothingToMergeError, match=r"no .* has MLP that can merge; .* switch chunking off"):
        apply_token_merging(unet, ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True))


@pytest.mark.parametrize("dim", [0, 1])
def test_feed_forward_that_gets_chunks_later_is_dense_from_then_on(dim):
    """The plan is for all tokens of all images, and a chunk is some of them, or some of these."""
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    attention_alone = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, ToMeConfig(ratio=0.5, merge_mlp=True))
    assert not torch.allclose(hosts.call(unet, **hosts.inputs()), attention_alone)
    for module in unet.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.set_chunk_feed_forward(1 if dim == 0 else 64, dim)
    torch.testing.assert_close(hosts.call(unet, **hosts.inputs()), attention_alone)


def test_blocks_that_are_called_without_their_model_merge_with_random_destinations():
    unet = hosts.unet()
    with token_merging(unet, ToMeConfig(ratio=0.5)) as patch, patch.record() as plans, torch.no_grad():
        text = hosts.inputs()["encoder_hidden_states"]
        unet.down_blocks[0].attentions[0](
            torch.randn(2, 32, 16, 16), encoder_hidden_states=text, return_dict=False
        )
    destinations = next(iter(plans.values())).plan.kept()[0, -64:]
    assert set((destinations % 2).tolist()) == {0, 1}


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_compiled_patched_model_runs_its_own_weights(make_copy):
    unet = one_level()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    unet.compile(backend="eager")
    copied = make_copy(unet)
    torch.nn.init.zeros_(copied.conv_out.weight)
    torch.nn.init.zeros_(copied.conv_out.bias)
    assert not hosts.call(copied, **hosts.inputs()).any()


def add_diffusers_hook(module: nn.Module) -> Callable[[], None]:
    class Doubles(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Doubles(), "doubles")
    return lambda: registry.remove_hook("doubles")


def add_diffusers_hook_that_replaces(module: nn.Module) -> Callable[[], None]:
    class Doubles(ModelHook):
        def new_forward(self, module: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
            return 2 * self.fn_ref.original_forward(*args, **kwargs)

    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Doubles(), "doubles")
    return lambda: registry.remove_hook("doubles")


def add_accelerate_hook(module: nn.Module) -> Callable[[], None]:
    class Doubles(AccelerateHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    add_hook_to_module(module, Doubles())
    return lambda: remove_hook_from_module(module)


HOOKS = [add_diffusers_hook, add_diffusers_hook_that_replaces, add_accelerate_hook]


@pytest.mark.parametrize("add_hook", HOOKS)
def test_hooks_and_merging_in_any_order(add_hook):
    """Both act whichever came first, and each goes when it is removed, whichever goes first."""
    path = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    unet = hosts.unet()
    config = ToMeConfig(ratio=0.5)
    dense = hosts.call(unet, **hosts.inputs())
    with token_merging(unet, config):
        merged = hosts.call(unet, **hosts.inputs())
        remove_hook = add_hook(unet.get_submodule(path))
        both = hosts.call(unet, **hosts.inputs())
        remove_hook()
    remove_hook = add_hook(unet.get_submodule(path))
    hooked = hosts.call(unet, **hosts.inputs())
    remove_hook()
    assert len({t.sum().item() for t in (dense, merged, both, hooked)}) == 4

    for hook_first in (True, False):
        for remove_hook_first in (True, False):
            unet = hosts.unet()
            if hook_first:
                remove_hook = add_hook(unet.get_submodule(path))
                patch = apply_token_merging(unet, config)
            else:
                patch = apply_token_merging(unet, config)
                remove_hook = add_hook(unet.get_submodule(path))
            assert torch.equal(hosts.call(unet, **hosts.inputs()), both)
            (remove_hook if remove_hook_first else patch.remove)()
            assert torch.equal(hosts.call(unet, **hosts.inputs()), merged if remove_hook_first else hooked)
            (patch.remove if remove_hook_first else remove_hook)()
            assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)


def test_hooks_hold_the_original_method_again_after_removal():
    unet = hosts.unet()
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    original = type(attention).forward
    add_diffusers_hook(attention)
    (reference,) = attention._diffusers_hook._fn_refs
    patch = apply_token_merging(unet, ToMeConfig(ratio=0.5))
    assert reference.forward.__func__ is not original
    patch.remove()
    assert reference.forward.__func__ is original


def test_a_forward_that_other_software_put_on_a_module_is_refused_and_nothing_is_changed():
    unet = hosts.unet()
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    attention.forward = lambda *args, **kwargs: args[0]
    before = state(unet)
    with pytest.raises(
        UnsupportedModelError, match=r"transformer_blocks\.0\.attn1: other software has replaced"
    ):
        apply_token_merging(unet, ToMeConfig(ratio=0.5))
    assert state(unet) == before


def test_a_sample_that_is_too_small_is_refused_before_anything_runs():
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    with pytest.raises(NothingToMergeError, match="the sample gives 1 × 8 tokens at level 1"):
        hosts.call(unet, **hosts.inputs(2, 1, 8))


def test_a_level_that_is_too_small_is_left_dense():
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5, max_downsample=2))
    seen = tokens_seen(unet, **hosts.inputs(2, 2, 8))
    assert seen["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"] == 8
    assert seen["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"] == 4


def one_level() -> nn.Module:
    """The smallest UNet, because tracing takes most of the time."""
    return hosts.unet(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        norm_num_groups=4,
    )


@pytest.mark.slow
def test_compiles_into_one_graph_and_new_settings_are_noticed():
    """``fullgraph=True`` fails at any graph break. Eager execution of the graph: no compiler is needed."""
    torch._dynamo.reset()
    unet = one_level()
    dense = hosts.call(unet, **hosts.inputs())
    compiled = torch.compile(unet, fullgraph=True, backend="eager")
    assert torch.equal(hosts.call(compiled, **hosts.inputs()), dense)
    for config in (ToMeConfig(ratio=0.5), ToMeConfig(ratio=0.25, **EVERYTHING)):
        patch = apply_token_merging(compiled, config)
        merged = hosts.call(unet, **hosts.inputs())
        assert not torch.equal(merged, dense)
        assert torch.equal(hosts.call(compiled, **hosts.inputs()), merged)
    patch.remove()
    assert torch.equal(hosts.call(compiled, **hosts.inputs()), dense)


@pytest.mark.slow
def test_compiling_by_block_takes_as_many_graphs_as_the_plain_model_and_for_dynamic_sizes_one_more():
    """The one more, whatever the number of sizes: torch compiles the hook of a model's call by itself."""

    def graphs(merging: bool, by_block: bool) -> int:
        torch._dynamo.reset()
        compiled = []

        unet = one_level()
        if merging:
            apply_token_merging(unet, ToMeConfig(ratio=0.5))
        if by_block:
            unet.compile_repeated_blocks(fullgraph=True, backend=hosts.counting(compiled))
            hosts.call(unet, **hosts.inputs())
        else:
            unet = torch.compile(unet, fullgraph=True, dynamic=True, backend=hosts.counting(compiled))
            for size in (16, 24, 32):
                hosts.call(unet, **hosts.inputs(2, size, size + 8))
        return len(compiled)

    assert graphs(merging=True, by_block=True) == graphs(merging=False, by_block=True) == 1
    assert graphs(merging=True, by_block=False) == graphs(merging=False, by_block=False) + 1


@pytest.mark.parametrize("scope", ["layers", "keys", "block"])
def test_with_proportional_attention_too_all_blocks_share_one_graph(scope):
    """Of a model with more blocks than torch recompiles for, the last ones would not compile.

    PyTorch 2.7 makes a graph for each block of the plain model too.
    """

    def graphs(config: ToMeConfig | None) -> int:
        torch._dynamo.reset()
        compiled = []
        unet = one_level()
        if config is not None:
            apply_token_merging(unet, config)
        unet.compile_repeated_blocks(fullgraph=True, backend=hosts.counting(compiled))
        hosts.call(unet, **hosts.inputs())
        return len(compiled)

    assert graphs(ToMeConfig(ratio=0.5, scope=scope, proportional=True)) == graphs(None)


@pytest.mark.parametrize("missing", ["sample", "timestep"])
def test_a_patched_model_that_is_called_without_an_argument_says_which(missing):
    unet, arguments = hosts.unet(), hosts.inputs()
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    with pytest.raises(UnsupportedModelError, match=f"UNet2DConditionModel: called without {missing}; token"):
        unet(**{name: value for name, value in arguments.items() if name != missing})
