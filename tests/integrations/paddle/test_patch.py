"""What always holds for a patched model: identity at 0, exact removal, same seed, typed errors."""

import copy
import inspect
import subprocess
import sys
import threading
from importlib.util import find_spec

import numpy as np
import paddle
import paddle_hosts as hosts
import pytest

import tokenmerge.paddle as tokenmerge_paddle
from tokenmerge import ConfigError, MergeSharing, NothingToMergeError, ToMeConfig, UnsupportedModelError
from tokenmerge.paddle import apply_patch, apply_token_merging, remove_patch, token_merging

ALL = {"max_downsample": 2, "merge_crossattn": True, "merge_mlp": True}
SETTINGS = {
    "attention": {},
    "everything": ALL,
    "uniform": {"planner": "uniform", "ratio": 0.75},
    "keys": {"scope": "keys"},
    "keep": {"combine": "keep"},
    "proportional": {"proportional": True, **ALL},
    "proportional keys": {"proportional": True, "scope": "keys"},
    "without guidance": {"merge_sharing": MergeSharing(guidance=False)},
    "levels": {"max_downsample": 2, "rules": [{"level": 2, "ratio": 0.25, "planner": "uniform"}]},
}


def config(name):
    return ToMeConfig(**{"ratio": 0.5, **SETTINGS[name]})


def test_importing_it_needs_neither_torch_nor_diffusers():
    script = (
        "import sys, tokenmerge.paddle, tokenmerge.paddle.pipeline_methods\n"
        "print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert find_spec("torch") is find_spec("diffusers") is None  # the tests themselves run without them


def test_the_signatures_are_those_of_tomesd_and_of_ppdiffusers():
    for name, own in (("apply_tome", hosts.OWN_APPLY), ("remove_tome", hosts.OWN_REMOVE)):
        ours = list(inspect.signature(getattr(tokenmerge_paddle, name)).parameters.values())[1:]
        other = list(inspect.signature(own).parameters.values())[1:]
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in other]
    assert list(inspect.signature(apply_patch).parameters)[1:] == [
        *("ratio", "max_downsample", "sx", "sy", "use_rand", "merge_attn", "merge_crossattn", "merge_mlp")
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_merging_changes_the_result_and_removing_restores_it_bit_for_bit(name):
    unet = hosts.unet()
    dense, before = hosts.run(unet), hosts.everything(unet)
    patch = apply_token_merging(unet, config(name))
    merged = hosts.run(unet)
    assert 1e-4 < np.abs(merged - dense).max() < np.abs(dense).max()
    assert np.array_equal(hosts.run(unet), merged)
    patch.remove()
    assert hosts.everything(unet) == before
    assert np.array_equal(hosts.run(unet), dense)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "levels"])
def test_a_ratio_of_0_is_bit_equal_to_dense(name):
    unet = hosts.unet()
    dense = hosts.run(unet)
    apply_token_merging(unet, ToMeConfig(**{**SETTINGS[name], "ratio": 0}))
    assert np.array_equal(hosts.run(unet), dense)
    assert np.array_equal(hosts.run(unet, height=1, width=4), hosts.run(hosts.unet(), height=1, width=4))


@pytest.mark.parametrize("name", SETTINGS)
def test_an_image_is_the_same_in_a_batch_of_any_size(name):
    unet = hosts.unet()
    apply_token_merging(unet, config(name))
    one, three = hosts.run(unet, batch=1), hosts.run(unet, batch=3)
    # Float32 products of another shape are summed in another order.
    assert np.abs(three[:1] - one).max() < 2e-5


def test_the_global_generator_is_neither_used_nor_changed():
    unet = hosts.unet()
    apply_patch(unet, max_downsample=2)
    paddle.seed(1)
    expected = paddle.rand([8]).numpy()
    paddle.seed(1)
    first = hosts.run(unet)
    assert np.array_equal(paddle.rand([8]).numpy(), expected)
    paddle.seed(2)
    assert np.array_equal(hosts.run(unet), first)


def test_the_draw_depends_on_the_timestep_and_on_the_seed():
    unet, arguments = hosts.unet(), hosts.inputs()
    assert unet.conv_in  # a model that is called with the same sample at two timesteps
    seen = []
    for seed in (0, 1):
        apply_token_merging(unet, ToMeConfig(ratio=0.5, seed=seed))
        seen.append(hosts.call(unet, **arguments))
    assert not np.array_equal(*seen)

    from tokenmerge.integrations import portable

    draws = []
    original = portable.plan_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "plan_tokens", lambda *args: draws.append(args[4]) or original(*args))
        for timestep in (paddle.to_tensor(500), 500, paddle.to_tensor([500, 500]), 501.5):
            hosts.call(unet, **{**arguments, "timestep": timestep})
    assert draws[0] == draws[3] == draws[6] != draws[9]


def test_prompts_of_one_picture_share_a_plan():
    unet = hosts.unet()
    arguments = hosts.inputs(batch=2)
    arguments["sample"] = paddle.concat([arguments["sample"][:1]] * 2)
    alone = {name: value if name == "timestep" else value[:1] for name, value in arguments.items()}
    plans = []
    from tokenmerge.integrations import portable

    original = portable.plan_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            portable, "plan_tokens", lambda *args: plans.append((args[5], original(*args))) or plans[-1][1]
        )
        apply_token_merging(unet, ToMeConfig(ratio=0.5))
        hosts.call(unet, **arguments)
        parts, plan = plans[-1]
        labels = plan.inverse.numpy() % plan.keep.shape[1]
        assert parts == 2
        assert np.array_equal(*labels)
        hosts.call(unet, **alone)
        assert plans[-1][0] == 1
        hosts.run(unet)  # two different images
        assert plans[-1][0] == 1


def test_a_pictures_channels_may_differ_between_prompts_that_share_a_plan():
    """As in InstructPix2Pix, which leaves the image out for one of three prompts."""
    from tokenmerge.integrations.paddle.runtime import _parts

    unet = hosts.unet(in_channels=8)
    latents, picture = hosts.tensor(1, 4, 8, 8), hosts.tensor(1, 4, 8, 8, seed=1)
    shown, left_out = (paddle.concat([latents, image], axis=1) for image in (picture, 0 * picture))
    assert _parts(unet, paddle.concat([shown, shown, left_out])) == 3
    assert _parts(unet, paddle.concat([shown, shown, 2 * shown])) == 1


def test_a_copy_of_a_patched_model_is_patched_on_its_own():
    unet = hosts.unet()
    dense = hosts.run(unet)
    apply_patch(unet)
    merged, copied = hosts.run(unet), copy.deepcopy(unet)
    remove_patch(unet)
    assert np.array_equal(hosts.run(copied), merged)
    remove_patch(copied)
    assert np.array_equal(hosts.run(copied), dense)
    assert hosts.everything(copied) == hosts.everything(unet)


def test_threads_on_one_model_do_not_mix_their_steps():
    unet = hosts.unet()
    apply_patch(unet)
    arguments = [{**hosts.inputs(), "timestep": t} for t in (100, 900)]
    alone = [hosts.call(unet, **each) for each in arguments]
    results = [[], []]

    def generate(i):
        for _ in range(5):
            results[i].append(hosts.call(unet, **arguments[i]))

    threads = [threading.Thread(target=generate, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(result, alone[i]) for i in (0, 1) for result in results[i])


def test_applying_again_replaces_the_settings_and_the_older_handle_lets_go():
    unet = hosts.unet()
    older = apply_token_merging(unet, ToMeConfig(ratio=0.25))
    apply_token_merging(unet, ToMeConfig(ratio=0.5))
    merged = hosts.run(unet)
    older.remove()
    assert np.array_equal(hosts.run(unet), merged)
    other = hosts.unet()
    apply_token_merging(other, ToMeConfig(ratio=0.5))
    assert np.array_equal(hosts.run(other), merged)


def test_the_context_puts_back_what_was_there_also_after_an_exception():
    unet = hosts.unet()
    dense = hosts.run(unet)
    with token_merging(unet, ToMeConfig(ratio=0.5)):
        assert not np.array_equal(hosts.run(unet), dense)
    assert np.array_equal(hosts.run(unet), dense)
    apply_token_merging(unet, ToMeConfig(ratio=0.25))
    merged = hosts.run(unet)
    with pytest.raises(RuntimeError, match="stop"), token_merging(unet, ToMeConfig(ratio=0.5)):
        raise RuntimeError("stop")
    assert np.array_equal(hosts.run(unet), merged)


def test_after_an_exception_in_the_model_it_goes_on_as_before():
    unet = hosts.unet()
    apply_patch(unet)
    merged = hosts.run(unet)
    block = hosts.blocks(unet)[0]
    norm, block.norm2 = block.norm2, None
    with pytest.raises(TypeError):
        hosts.run(unet)
    block.norm2 = norm
    assert np.array_equal(hosts.run(unet), merged)
    remove_patch(unet)
    assert np.array_equal(hosts.run(unet), hosts.run(hosts.unet()))


def test_a_method_that_was_held_on_to_does_what_it_did_before():
    unet = hosts.unet()
    attention = hosts.blocks(unet)[0].attn1
    apply_patch(unet)
    forward = attention.forward
    remove_patch(unet)
    x = hosts.tensor(2, 256, 32)
    assert np.array_equal(forward(x).numpy(), attention(x).numpy())


@pytest.mark.parametrize("ratio", [0.75, 0.8, 1])
def test_the_highest_ratio_is_the_value_error_that_users_of_ppdiffusers_know(ratio):
    for apply in (apply_patch, tokenmerge_paddle.apply_tome):
        with pytest.raises(ValueError, match=r"expected less than 1 − 1/\(sx·sy\) = 0.75") as caught:
            apply(hosts.unet(), ratio=ratio)
        assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": -0.1}, "ratio: expected a number from 0"),
        ({"ratio": "half"}, "got 'half'"),
        ({"sx": 0}, "sx: expected an integer ≥ 1, got 0"),
        ({"merge_attn": False}, "nothing would merge; set one"),
    ],
)
def test_bad_values_are_errors_and_nothing_is_patched(settings, message):
    unet = hosts.unet()
    before = hosts.everything(unet)
    with pytest.raises(ConfigError, match=message):
        apply_patch(unet, **settings)
    assert hosts.everything(unet) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"planner": "sito"},
        {"scope": "block"},
        {"st": 2},
        {"rules": [{"until": 0.5, "ratio": 0.2}]},
        {"merge_sharing.every": 2},
        {"merge_sharing.blocks": True},
        {"reuse.every": 2},
        {"rules": [{"level": 2, "scope": "block"}]},
    ],
)
def test_what_is_not_offered_says_so(settings):
    name = next(iter(settings))
    if name == "rules":
        name = "scope" if "scope" in settings["rules"][0] else r"rules\[0\]"
    with pytest.raises(ConfigError, match=f"^{name}: .*on Paddle"):
        apply_token_merging(hosts.unet(), ToMeConfig.from_dict({"ratio": 0.5, **settings}))


def test_a_ratio_alone_is_not_enough():
    with pytest.raises(ConfigError, match=r"expected a ToMeConfig such as ToMeConfig\(ratio=0.5\), got 0.5"):
        apply_token_merging(hosts.unet(), 0.5)


def test_nothing_to_merge_is_an_error():
    unet = hosts.unet()
    for block in hosts.blocks(unet):
        block.set_chunk_feed_forward(2)
    with pytest.raises(NothingToMergeError, match="feed-forward layers that run in chunks stay dense"):
        apply_patch(unet, merge_attn=False, merge_mlp=True)


def test_a_sample_that_is_too_small_is_an_error_when_it_is_seen():
    unet = hosts.unet()
    apply_patch(unet, sx=8, sy=8)
    with pytest.raises(NothingToMergeError, match=r"4 × 4 tokens at level 1, of which ratio=0.5 with cells"):
        hosts.run(unet, height=4, width=4)


@pytest.mark.parametrize("model", [paddle.nn.Linear(2, 2), "unet", None])
def test_what_is_no_model_is_an_error(model):
    for do in (apply_patch, remove_patch):
        with pytest.raises(UnsupportedModelError, match="pass a pipeline of ppdiffusers"):
            do(model)


def test_beside_ppdiffusers_own_patch_it_is_refused():
    unet = hosts.unet()
    hosts.OWN_APPLY(unet)
    with pytest.raises(UnsupportedModelError, match="ppdiffusers' own apply_tome is on; call"):
        apply_patch(unet)
    hosts.OWN_REMOVE(unet)
    apply_patch(unet)


def test_a_forward_on_the_layer_itself_is_refused():
    unet = hosts.unet()
    attention = hosts.blocks(unet)[0].attn1
    attention.forward = attention.forward
    with pytest.raises(
        UnsupportedModelError, match="attn1: other software has replaced its method 'forward'"
    ):
        apply_patch(unet)


def test_a_block_that_is_called_outside_of_its_model_says_what_to_do():
    unet = hosts.unet()
    apply_patch(unet)
    with pytest.raises(UnsupportedModelError, match="call the model and not a part of it"):
        hosts.blocks(unet)[0](hosts.tensor(2, 256, 32))


def test_the_report_says_what_merges_where():
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(ratio=0.5, merge_mlp=True))
    report = patch.report()
    assert [(row.level, row.grid, row.tokens, row.merged_tokens) for row in report.rows] == [
        (1, (16, 16), 256, 128)
    ] * 3
    assert {row.merged for row in report.rows} == {"attn1+ff"}
    assert all(row.flops_merged < row.flops_dense for row in report.rows)
    assert report.notes == ("UNet2DConditionModel: 4 blocks stay dense at level 2: max_downsample=1",)
    text = str(patch)
    assert "256 → 128" in text
    assert "down_blocks.0.attentions.0.transformer_blocks.0" in text
    small = patch.report(height=3, width=1)
    assert small.rows == ()
    assert "their token grid is too small" in small.notes[0]
    with pytest.raises(ConfigError, match="height: expected an integer ≥ 1, got 0"):
        patch.report(height=0)


def test_the_operations_of_the_report_are_those_of_the_layers():
    """Attention as in the docs: four projections and two products; compared with Paddle's counter."""
    unet = hosts.unet()
    row = tokenmerge_paddle.predict(unet, ToMeConfig(ratio=0.5), batch=1).rows[0]
    c, n, m = 32, 256, 128
    assert row.flops_dense == 2 * 4 * n * c * c + 4 * n * n * c
    assert row.flops_merged == 2 * 4 * m * c * c + 4 * m * m * c + 2 * 192 * 64 * c
    keys = tokenmerge_paddle.predict(unet, ToMeConfig(ratio=0.5, scope="keys", planner="uniform"), batch=1)
    assert keys.rows[0].flops_merged == 2 * 2 * (n + 64) * c * c + 4 * n * 64 * c
    assert keys.rows[0].merged == "keys of attn1"
