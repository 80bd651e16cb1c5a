"""Ways in which models of ppdiffusers are built, set up and called."""

import numpy as np
import paddle
import paddle_hosts as hosts
import pytest
from paddle.nn import functional as F
from ppdiffusers import Transformer2DModel
from ppdiffusers.models.attention_processor import SlicedAttnProcessor, XFormersAttnProcessor

from tokenmerge import MergeSharing, ToMeConfig, UnsupportedModelError
from tokenmerge.integrations.paddle.models import find_hosts
from tokenmerge.integrations.paddle.runtime import STATE
from tokenmerge.integrations.portable import plan_tokens
from tokenmerge.paddle import apply_patch, apply_token_merging, remove_patch

# Float32 results of a few layers that add up the same numbers in another order.
CLOSE = 1e-5


def close(a, b):
    return np.abs(a - b).max() <= CLOSE * np.abs(b).max()


def test_levels_are_those_of_the_stages():
    (host,) = find_hosts(hosts.unet())
    assert [(block.path.split(".attentions")[0], block.level) for block in host.blocks] == [
        ("down_blocks.0", 1),
        ("down_blocks.1", 2),
        ("up_blocks.0", 2),
        ("up_blocks.0", 2),
        ("up_blocks.1", 1),
        ("up_blocks.1", 1),
        ("mid_block", 2),
    ]


def test_by_keyword_and_by_position_the_result_is_the_same():
    unet = hosts.unet()
    apply_patch(unet)
    arguments = hosts.inputs()
    with paddle.no_grad():
        by_position = unet(*arguments.values()).sample.numpy()
    assert np.array_equal(hosts.call(unet, **arguments), by_position)


@pytest.mark.parametrize("size", [(17, 13), (15, 16), (5, 64)])
def test_odd_sizes(size):
    unet = hosts.unet()
    dense = hosts.run(unet, 2, *size)
    apply_patch(unet, max_downsample=2)
    merged = hosts.run(unet, 2, *size)
    assert merged.shape == dense.shape
    assert not np.array_equal(merged, dense)


def test_sdxl_with_levels():
    unet, arguments = hosts.sdxl(), hosts.inputs()
    added = {"text_embeds": hosts.tensor(2, hosts.TEXT), "time_ids": paddle.ones([2, 6])}
    arguments["added_cond_kwargs"] = added
    dense = hosts.call(unet, **arguments)
    patch = apply_token_merging(
        unet, ToMeConfig(ratio=0, max_downsample=2, rules=[{"level": 2, "ratio": 0.5}])
    )
    assert {(row.level, row.tokens, row.merged_tokens) for row in patch.report().rows} == {(2, 64, 32)}
    levels = hosts.call(unet, **arguments)
    apply_token_merging(unet, ToMeConfig(ratio=0.5, max_downsample=2))
    assert np.array_equal(levels, hosts.call(unet, **arguments))
    assert not np.array_equal(levels, dense)


def math_attention(query, key, value, attn_mask=None, scale=None, **options):
    """What ``paddle.nn.functional.scaled_dot_product_attention_`` of ppdiffusers does on a GPU."""
    query, key, value = (x.transpose([0, 2, 1, 3]) for x in (query, key, value))
    logits = paddle.matmul(query * scale, key, transpose_y=True)
    weights = F.softmax(logits if attn_mask is None else logits + attn_mask, axis=-1)
    return paddle.matmul(weights, value).transpose([0, 2, 1, 3])


@pytest.mark.parametrize(
    "settings",
    [
        {"merge_crossattn": True},
        {"proportional": True},
        {"scope": "keys"},
        {"scope": "keys", "proportional": True},
    ],
)
def test_any_attention_processor_gives_the_same_result(settings, monkeypatch):
    """ppdiffusers' memory-efficient attention has kernels only for GPUs; its processor is the same."""
    monkeypatch.setattr(F, "scaled_dot_product_attention_", math_attention, raising=False)
    unet = hosts.unet()
    # With this seed, no two edges are so alike that rounding sorts them.
    apply_token_merging(unet, ToMeConfig(ratio=0.5, max_downsample=2, seed=1, **settings))
    plain = hosts.run(unet)
    for processor in (XFormersAttnProcessor(), SlicedAttnProcessor(1)):
        unet.set_attn_processor(processor)
        assert close(hosts.run(unet), plain)


@pytest.mark.parametrize("scope", ["layers", "keys"])
def test_proportional_attention_counts_a_merged_token_as_often_as_it_stands_for_tokens(scope):
    """If the tokens of each group are equal, attention to groups by size equals attention to all tokens."""
    unet = hosts.unet()
    attention = hosts.blocks(unet)[0].attn1
    cells = hosts.tensor(2, 8, 1, 8, 1, 32)
    x = cells.expand([2, 8, 2, 8, 2, 32]).reshape([2, 256, 32])  # 2 × 2 equal tokens
    dense, results = attention(x).numpy(), []
    for proportional in (True, False):
        config = ToMeConfig(ratio=0.5, scope=scope, proportional=proportional)
        apply_token_merging(unet, config)
        state = attention.__dict__[STATE]
        plan = plan_tokens(paddle, x, (16, 16), config, 0)
        state.run.now.merge = state.block.path, plan
        results.append(attention(x).numpy())
    assert close(results[0], dense)
    assert not close(results[1], dense)


def test_proportional_attention_refuses_a_processor_that_may_ignore_the_mask():
    class Mine:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            return hidden_states

    unet = hosts.unet()
    unet.set_attn_processor(Mine())
    apply_token_merging(unet, ToMeConfig(ratio=0.5, proportional=True))
    with pytest.raises(UnsupportedModelError, match="expected one of ppdiffusers' own, got Mine"):
        hosts.run(unet)


def test_feed_forward_layers_that_run_in_chunks_stay_dense():
    unet = hosts.unet()
    apply_patch(unet)
    attention_alone = hosts.run(unet)
    patch = apply_token_merging(
        unet, ToMeConfig(ratio=0.5, merge_mlp=True, merge_sharing=MergeSharing(guidance=False))
    )
    for block in hosts.blocks(unet):  # after patching
        block.set_chunk_feed_forward(64, dim=1)
    assert close(hosts.run(unet), attention_alone)
    assert (
        patch.report().notes[-1] == "UNet2DConditionModel: feed-forward layers that run in chunks stay dense"
    )


def test_a_mask_of_the_keys_leaves_self_attention_dense():
    unet = hosts.unet()
    block = hosts.blocks(unet)[0]
    apply_patch(unet)
    state = block.attn1.__dict__[STATE]
    x, mask = hosts.tensor(2, 256, 32), paddle.zeros([2, 1, 256])
    plan = plan_tokens(paddle, x, (16, 16), ToMeConfig(ratio=0.5), 0)
    state.run.now.merge = state.block.path, plan
    masked, merged = block.attn1(x, attention_mask=mask).numpy(), block.attn1(x).numpy()
    remove_patch(unet)
    assert close(masked, block.attn1(x).numpy())
    assert not close(masked, merged)


def gradient(unet, checkpointing):
    unet.train()
    (unet.enable_gradient_checkpointing if checkpointing else unet.disable_gradient_checkpointing)()
    unet.clear_gradients()
    arguments = hosts.inputs()
    arguments["sample"].stop_gradient = False
    unet(**arguments).sample.square().mean().backward()
    weight = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q.weight
    return weight.grad.numpy()


def test_gradients_are_the_same_with_checkpointing():
    unet = hosts.unet()
    dense = gradient(unet, checkpointing=False)
    apply_patch(unet, merge_mlp=True)
    plain = gradient(unet, checkpointing=False)
    assert close(gradient(unet, checkpointing=True), plain)
    assert not close(plain, dense)


@pytest.mark.parametrize("settings", [{}, {"scope": "keys"}, {"planner": "uniform"}])
def test_a_transformer_of_patches_such_as_dit(settings):
    paddle.seed(0)
    dit = Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=10,
        norm_elementwise_affine=False,
        activation_fn="gelu-approximate",
        attention_bias=True,
    )
    dit.eval()
    call = {
        "hidden_states": hosts.tensor(2, 4, 16, 16),
        "timestep": paddle.to_tensor([7, 7]),
        "class_labels": paddle.to_tensor([1, 2]),
    }
    dense, before = hosts.call(dit, **call), hosts.everything(dit)
    patch = apply_token_merging(dit, ToMeConfig(ratio=0.5, **settings))
    merged = hosts.call(dit, **call)
    assert not np.array_equal(merged, dense)
    assert {(row.level, row.grid) for row in patch.report().rows} == {(1, (8, 8))}
    patch.remove()
    assert np.array_equal(hosts.call(dit, **call), dense)
    assert hosts.everything(dit) == before
