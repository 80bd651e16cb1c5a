"""What a patched vision transformer does, and that removing the patch restores it."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hosts
import onnxruntime
import pytest
import torch
import transformers
import vits
from torch import nn
from torch.testing import assert_close

from tokenmerge import (
    ConfigError,
    DecreasingSchedule,
    NothingToMergeError,
    ToMeConfig,
    UnsupportedModelError,
    ViTConfig,
    apply_token_merging,
    remove_token_merging,
    token_merging,
)

R = ViTConfig(r=6)
families = pytest.mark.parametrize("make", vits.MODELS, ids=lambda make: make.__name__)


def state(model: nn.Module) -> dict[str, tuple]:
    """All that patching could leave on a model."""
    return {
        name: (type(m), set(m.__dict__), list(m._forward_hooks), list(m._forward_pre_hooks))
        for name, m in model.named_modules()
    }


def last_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    seen = []
    handle = vits.layers(model)[-1].register_forward_hook(lambda _, args, y: seen.append(y))
    model(x)
    handle.remove()
    return seen[0]


@families
@torch.no_grad()
def test_r_0_is_bit_equal(make):
    model, x = make(), vits.pictures()
    dense = vits.tokens(model, x)
    apply_token_merging(model, ViTConfig(r=0))
    assert torch.equal(vits.tokens(model, x), dense)


@families
@pytest.mark.parametrize("r", [(6,) * 4, (12, 8, 4, 0), (0, 3, 0, 1), (0, 0, 18, 99)], ids=str)
@torch.no_grad()
def test_the_result_is_that_of_the_paper_written_out(make, r):
    """In float64, but the shares of merged tokens, and so the rounding errors, are float32."""
    model, x = make().double(), vits.pictures().double()
    expected = vits.slow_tokens(model, x, r, vits.PROTECTED[make])
    with token_merging(model, ViTConfig(r=r)) as patch, patch.record() as recorded:
        result = last_layer(model, x)
    sizes = list(recorded.values())[-1].sizes
    for got, got_sizes, (slow, slow_sizes) in zip(result, sizes, expected, strict=True):
        assert got_sizes.tolist() == slow_sizes
        assert_close(got, slow, atol=1e-6, rtol=1e-6)


@families
def test_its_gradients_are_those_of_the_paper_written_out(make):
    model, x = make().double(), vits.pictures(1).double()
    ((slow, _),) = vits.slow_tokens(model, x, [6] * 4, vits.PROTECTED[make])
    wanted = torch.autograd.grad(slow.square().sum(), list(vits.layers(model).parameters()))
    apply_token_merging(model, R)
    got = torch.autograd.grad(last_layer(model, x).square().sum(), list(vits.layers(model).parameters()))
    largest = max(b.abs().max().item() for b in wanted)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, atol=1e-6 * largest, rtol=1e-6)


@torch.no_grad()
def test_without_proportional_attention_sizes_do_not_reach_it():
    """The first merge changes the second layer's attention only through proportional attention."""
    model, x = vits.vit(), vits.pictures()
    attended = {}
    for proportional in (True, False):
        seen = []
        handle = vits.layers(model)[1].attention.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append([*args, *kwargs.values()]), with_kwargs=True
        )
        with token_merging(model, ViTConfig(r=6, proportional_attention=proportional)) as patch:
            with patch.record() as recorded:
                model(x)
            attended[proportional] = seen[0][1]
        handle.remove()
    assert attended[False] is None
    assert torch.equal(attended[True][:, 0, 0].exp().round(), recorded["layers.0"].sizes)


@families
@torch.no_grad()
def test_class_register_and_distillation_tokens_stay_alone_and_first(make):
    model, protected = make(), vits.PROTECTED[make]
    with token_merging(model, ViTConfig(r=99)) as patch, patch.record() as recorded:
        model(vits.pictures())
    assert len(recorded) == vits.DEPTH
    for behind in recorded.values():
        assert behind.sizes[:, :protected].eq(1).all()
        assert behind.source[:, :protected].eq(torch.arange(protected)).all()
        assert behind.source[:, protected:].min() == protected


@torch.no_grad()
def test_what_is_recorded_are_the_groups_of_the_patches():
    model = vits.vit()
    with token_merging(model, R) as patch, patch.record() as recorded:
        model(vits.pictures())
    for i, (path, behind) in enumerate(recorded.items()):
        assert path == f"layers.{i}"
        m = 37 - 6 * (i + 1)
        assert behind.sizes.shape == (2, m)
        for source, sizes in zip(behind.source, behind.sizes, strict=True):
            assert torch.equal(source.bincount(minlength=m).float(), sizes)
    labels = behind.labels()
    assert labels.shape == (2, 6, 6)
    assert torch.equal(labels.flatten(1), behind.source[:, 1:])
    assert torch.equal(behind.labels(4, 9).flatten(1), behind.source[:, 1:])
    with pytest.raises(ValueError, match="product is 36, got 5 × 7"):
        behind.labels(5, 7)


@torch.no_grad()
def test_a_head_that_averages_counts_each_patch_once():
    """A mean over merged tokens would count a group of many patches as one."""
    config = transformers.Dinov2Config(**vits._dinov2_settings(), num_labels=3)
    model = transformers.Dinov2ForImageClassification(config).eval()
    x = vits.pictures()
    with token_merging(model, R) as patch, patch.record() as recorded:
        logits = model(x).logits
    with token_merging(model.dinov2, R):
        merged = model.dinov2(x).last_hidden_state
    sizes = list(recorded.values())[-1].sizes[:, 1:, None]
    mean = (merged[:, 1:] * sizes).sum(1) / 36
    assert_close(logits, model.classifier(torch.cat([merged[:, 0], mean], dim=1)))
    assert any("encoder.layer.3 gives each input token a result" in note for note in patch.report().notes)


@torch.no_grad()
def test_a_head_that_pools_by_attention_counts_each_patch_once():
    """Attention to a token that stands for s patches is attention to s equal tokens: log s on its logit."""
    model, x = vits.siglip(pooling=True), vits.pictures()
    dense = model(x).pooler_output
    with token_merging(model, R) as patch, patch.record() as recorded:
        result = model(x)
    sizes, source = recorded["encoder.layers.3"].sizes, recorded["encoder.layers.3"].source
    assert sizes.shape == (2, 12)
    assert sizes.max() > 1
    for pooled, full, size, group in zip(
        result.pooler_output, result.last_hidden_state, sizes, source, strict=True
    ):
        # One of the equal tokens of each group, weighted by how many there are.
        one_each = full[[group.tolist().index(token) for token in range(12)]]
        head = model.head
        y, _ = head.attention(head.probe[0], one_each, one_each, attn_mask=size.log()[None])
        assert_close(pooled, (y + head.mlp(head.layernorm(y)))[0])
    assert torch.equal(model(x).pooler_output, dense)
    assert any("encoder.layers.3 gives each input token a result" in note for note in patch.report().notes)


@torch.no_grad()
def test_siglip_with_a_text_model_and_as_a_classifier():
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.SiglipConfig(
        vision_config=vits.SHAPE, text_config={**text, "vocab_size": 50}, num_labels=3
    )
    x, ids = vits.pictures(), torch.ones(2, 3, dtype=torch.int64)
    both = transformers.SiglipModel(config).eval()
    dense = both(input_ids=ids, pixel_values=x)
    with token_merging(both, R) as patch, patch.record() as recorded:
        merged = both(input_ids=ids, pixel_values=x)
    assert recorded["encoder.layers.3"].sizes.shape == (2, 12)
    assert torch.equal(merged.text_embeds, dense.text_embeds)
    assert not torch.equal(merged.image_embeds, dense.image_embeds)
    assert torch.equal(both(input_ids=ids, pixel_values=x).image_embeds, dense.image_embeds)

    classifier = transformers.SiglipForImageClassification(config).eval()
    with token_merging(classifier, R) as patch, patch.record() as recorded:
        logits = classifier(x).logits
        full = classifier.vision_model(x).last_hidden_state
    sizes, source = recorded["encoder.layers.3"].sizes, recorded["encoder.layers.3"].source
    for got, tokens, size, group in zip(logits, full, sizes, source, strict=True):
        one_each = tokens[[group.tolist().index(token) for token in range(12)]]
        assert_close(got, classifier.classifier((one_each * size[:, None]).sum(0) / 36))


@families
@torch.no_grad()
def test_unmerge_gives_each_input_token_the_result_of_the_one_that_holds_it(make):
    model, x = make(), vits.pictures()
    with token_merging(model, R):
        merged = vits.tokens(model, x)
    with token_merging(model, ViTConfig(r=6, unmerge=True)) as patch, patch.record() as recorded:
        full = vits.tokens(model, x)
    source = list(recorded.values())[-1].source
    assert full.shape[1] == 36 + vits.PROTECTED[make] == source.shape[1]
    for i in range(2):
        assert_close(full[i], merged[i, source[i]])  # the norm after it may round differently for more rows


@families
@torch.no_grad()
def test_removal_leaves_nothing(make):
    model, x = make(), vits.pictures()
    before, dense = state(model), vits.tokens(model, x)
    patch = apply_token_merging(model, R)
    assert state(model) != before
    assert vits.tokens(model, x).shape[1] == dense.shape[1] - 24
    patch.remove()
    assert state(model) == before
    assert torch.equal(vits.tokens(model, x), dense)
    patch.remove()
    remove_token_merging(model)
    assert state(model) == before


@families
@torch.no_grad()
def test_an_exception_in_the_middle_leaves_nothing_behind(make):
    model, x = make(), vits.pictures()
    before = state(model)
    with token_merging(model, R):
        merged = vits.tokens(model, x)
        handle = vits.layers(model)[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        left = vits.layers(model)[2].__dict__["_tokenmerge"].encoder.running.value
        assert (left.r, left.plan, left.tokens) == (0, None, None)
        assert torch.equal(vits.tokens(model, x), merged)
    assert state(model) == before


@families
@torch.no_grad()
def test_copies_merge_too_and_are_restored_alone(make):
    model, x = make(), vits.pictures()
    before = state(model)
    apply_token_merging(model, R)
    merged = vits.tokens(model, x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(vits.tokens(copied, x), merged)
        remove_token_merging(copied)
        assert state(copied) == before
    assert torch.equal(vits.tokens(model, x), merged)


@torch.no_grad()
def test_saving_a_patched_model_saves_the_plain_one(tmp_path):
    model, x = vits.vit(), vits.pictures()
    dense = vits.tokens(model, x)
    apply_token_merging(model, R)
    model.save_pretrained(tmp_path)
    loaded = transformers.ViTModel.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) is transformers.ViTModel
    assert torch.equal(vits.tokens(loaded, x), dense)


@families
@torch.no_grad()
def test_a_picture_does_not_depend_on_its_batch(make):
    """Sums in a larger batch may have another order; the dense model shows the effect of that."""
    model, alone, three = make(), vits.pictures(1), vits.pictures(3)
    rounding = (vits.tokens(model, three)[:1] - vits.tokens(model, alone)).abs().max()
    apply_token_merging(model, R)
    expected = vits.tokens(model, alone)
    for got in (vits.tokens(model, three)[:1], vits.tokens(model, three.flip(0))[2:]):
        assert_close(got, expected, atol=10 * rounding.item() + 1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("make", [vits.vit, vits.timm])
@torch.no_grad()
def test_compiles_into_one_graph_and_new_settings_are_noticed(make):
    torch._dynamo.reset()
    model, x = make(), vits.pictures()
    dense = vits.tokens(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for config in (R, ViTConfig(r=(9, 0, 4, 1), unmerge=True)):
        patch = apply_token_merging(compiled, config)
        merged = vits.tokens(model, x)
        assert torch.equal(vits.tokens(compiled, x), merged)
    patch.remove()
    assert torch.equal(vits.tokens(compiled, x), dense)


def gradients(model: nn.Module, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    call().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_gradients_are_those_without_checkpointing_also_after_another_call():
    """Another call merges other tokens between a call and its backward pass."""
    model = vits.vit().train()
    apply_token_merging(model, R)

    def call() -> torch.Tensor:
        first = vits.tokens(model, vits.pictures())
        vits.tokens(model, vits.pictures(4)[2:])
        return first

    plain = gradients(model, call)
    model.gradient_checkpointing = True
    for layer in model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False
        )
    for a, b in zip(gradients(model, call), plain, strict=True):
        assert torch.equal(a, b)


def test_layers_that_run_again_without_their_call_are_refused():
    model = vits.timm()
    model.grad_checkpointing = True
    apply_token_merging(model, R)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.3: called without .*set_grad_checkpointing"):
        model(vits.pictures()).sum().backward()


def tokens_of_layers(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The tokens after each layer, by the call with which the library collects them."""
    if hasattr(model, "forward_intermediates"):
        pairs = model.forward_intermediates(
            x, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
        )
        return [torch.cat(pair[::-1], dim=1) if isinstance(pair, tuple) else pair for pair in pairs]
    return list(model(x, output_hidden_states=True).hidden_states[1:])


@families
@torch.no_grad()
def test_tokens_that_are_collected_from_the_layers_have_their_places(make):
    """Each token of the input has the result of the token that holds it, in every layer, to the last bit."""
    model, x = make(), vits.pictures()
    dense, seen = tokens_of_layers(model, x), []
    with token_merging(model, R) as patch:
        handles = [
            layer.register_forward_hook(lambda _, args, y: seen.append(y)) for layer in vits.layers(model)
        ]
        with patch.record() as recorded:
            model(x)
        for handle in handles:
            handle.remove()
        collected = tokens_of_layers(model, x)
        assert vits.tokens(model, x).shape[1] == 12 + vits.PROTECTED[make]  # the next call does not collect
    assert len(collected) == vits.DEPTH
    for got, merged, tokens in zip(collected, seen, recorded.values(), strict=True):
        wanted = torch.stack([merged[i, tokens.source[i]] for i in range(2)])
        assert torch.equal(got, wanted)
        assert torch.equal(tokens.unmerge(merged), wanted)
        with pytest.raises(
            ValueError, match=rf"expected the {merged.shape[1]} tokens .*, got {got.shape[1]}; "
        ):
            tokens.unmerge(got)
    with token_merging(model, ViTConfig(r=0)):
        for got, wanted in zip(tokens_of_layers(model, x), dense, strict=True):
            assert torch.equal(got, wanted)
    for got, wanted in zip(tokens_of_layers(model, x), dense, strict=True):
        assert torch.equal(got, wanted)


def test_gradients_of_a_call_that_collects_are_those_of_one_that_does_not():
    model = vits.vit()
    apply_token_merging(model, ViTConfig(r=6, unmerge=True))
    plain = gradients(model, lambda: vits.tokens(model, vits.pictures()))
    collecting = gradients(model, lambda: vits.tokens(model, vits.pictures(), output_hidden_states=True))
    for a, b in zip(collecting, plain, strict=True):
        assert_close(a, b)


@torch.no_grad()
def test_every_way_to_ask_for_hidden_states_gives_all_tokens():
    x = vits.pictures()
    model = vits.clip()
    with token_merging(model, R):
        wanted = model(x, output_hidden_states=True)
        embedded = model.pre_layrnorm(model.embeddings(x))
        assert {h.shape[1] for h in (*wanted.hidden_states, wanted.last_hidden_state)} == {37}
        some = model(x, output_hidden_states=[-2]).hidden_states
        assert torch.equal(some[-2], wanted.hidden_states[-2])
        assert {h.shape[1] for h in model.encoder(embedded, output_hidden_states=True).values()} == {37}
        model.config.output_hidden_states = True
        assert torch.equal(model(x).hidden_states[2], wanted.hidden_states[2])
        assert model(x, output_hidden_states=False).last_hidden_state.shape[1] == 13
    around = vits.clip_both()
    with token_merging(around, R):
        features = around.get_image_features(x, output_hidden_states=True)
        assert {h.shape[1] for h in features.hidden_states} == {37}


@families
def test_threads_that_share_a_model_do_not_disturb_each_other(make):
    model = make()
    apply_token_merging(model, R)

    @torch.no_grad()
    def call(i: int) -> list[torch.Tensor]:
        x = vits.pictures(i % 3 + 1)
        return tokens_of_layers(model, x) if i % 2 else [vits.tokens(model, x)]

    expected = [call(i) for i in range(6)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(call, range(24)))
    for i, result in enumerate(results):
        assert all(map(torch.equal, result, expected[i % 6])), i


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_collects_too():
    torch._dynamo.reset()
    model, x = vits.vit(), vits.pictures()
    apply_token_merging(model, R)
    model(x, output_hidden_states=True)  # transformers puts its hooks in place
    compiled = torch.compile(model, backend="eager")
    for wanted, got in zip(tokens_of_layers(model, x), tokens_of_layers(compiled, x), strict=True):
        assert got.shape[1] == 37
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("registers", [False, True])
@torch.no_grad()
def test_feature_maps_of_backbones(registers):
    name = "Dinov2WithRegisters" if registers else "Dinov2"
    config = getattr(transformers, f"{name}Config")(**vits._dinov2_settings(), out_indices=[1, 2, 4])
    model = getattr(transformers, f"{name}Backbone")(config).eval()
    x = vits.pictures()
    dense = model(x).feature_maps
    with token_merging(model, ViTConfig(r=0)):
        assert all(torch.equal(a, b) for a, b in zip(model(x).feature_maps, dense, strict=True))
    with token_merging(model, R) as patch:
        with patch.record() as recorded:
            maps = model(x).feature_maps
        for got, i in zip(maps, (0, 1, 3), strict=True):
            assert got.shape == (2, 32, 6, 6)
            labels = recorded[f"encoder.layer.{i}"].labels()
            for feature, groups in zip(got, labels, strict=True):
                for group in groups.unique():  # the patches of a group have one value, others have others
                    assert feature[:, groups == group].unique(dim=1).shape[1] == 1
                assert feature.flatten(1).unique(dim=1).shape[1] == len(groups.unique())
        rows = patch.report().rows
        assert [row.tokens - row.merged_tokens for row in rows] == [6] * 4
    assert all(torch.equal(a, b) for a, b in zip(model(x).feature_maps, dense, strict=True))


@torch.no_grad()
def test_attention_weights_and_causal_attention_are_refused_where_tokens_merge_and_nowhere_else():
    model, x = vits.vit(attn_implementation="eager"), vits.pictures()
    dense = model(x, output_attentions=True).attentions
    with token_merging(model, ViTConfig(r=0)):
        assert all(map(torch.equal, model(x, output_attentions=True).attentions, dense))
    patch = apply_token_merging(model, R)
    with pytest.raises(UnsupportedModelError, match=r"output_attentions: .* call the model without"):
        model(x, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(UnsupportedModelError, match="output_attentions: "):
        model(x)
    assert model(x, output_attentions=False).last_hidden_state.shape[1] == 13
    assert "37 tokens in the first layer" in repr(patch)

    other = vits.timm()
    apply_token_merging(other, R)
    for call in (other, other.forward_intermediates):
        with pytest.raises(UnsupportedModelError, match=r"is_causal: .* call the model without"):
            call(x, is_causal=True)
    with pytest.raises(UnsupportedModelError, match="attn_mask: a mask of shape"):
        other.forward_intermediates(x, attn_mask=torch.zeros(36, 36))


@torch.no_grad()
def test_eager_attention_and_sdpa_agree():
    eager, fused = vits.vit(attn_implementation="eager"), vits.vit()
    for model in (eager, fused):
        apply_token_merging(model, R)
    assert_close(vits.tokens(eager, vits.pictures()), vits.tokens(fused, vits.pictures()))


@families
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision(make, dtype):
    model, x = make(), vits.pictures()
    with token_merging(model, R), torch.autocast("cpu", dtype=dtype):
        assert vits.tokens(model, x).isfinite().all()
    model.to(dtype)
    with token_merging(model, R):
        result = vits.tokens(model, x.to(dtype))
    assert result.dtype == dtype
    assert result.isfinite().all()
    assert result.shape[1] == 12 + vits.PROTECTED[make]


@torch.no_grad()
def test_other_sizes_of_pictures():
    model = vits.vit()
    apply_token_merging(model, R)
    result = vits.tokens(model, vits.pictures(size=32), interpolate_pos_encoding=True)
    assert result.shape[1] == 65 - 24


@torch.no_grad()
def test_models_around_an_encoder_and_pipelines_and_two_kinds_of_merging():
    both = vits.clip_both()
    x, text = vits.pictures(), torch.ones(2, 3, dtype=torch.int64)
    dense = both(input_ids=text, pixel_values=x)
    with token_merging(both, R) as patch:
        merged = both(input_ids=text, pixel_values=x)
        assert merged.vision_model_output.last_hidden_state.shape[1] == 13
        assert torch.equal(merged.text_embeds, dense.text_embeds)
        assert patch.report().model == "CLIPVisionModel"
    assert torch.equal(both(input_ids=text, pixel_values=x).image_embeds, dense.image_embeds)

    class Pipeline:
        model = None

        def __init__(self) -> None:
            self.model = both

    with token_merging(Pipeline(), R):
        assert both.vision_model(x).last_hidden_state.shape[1] == 13


def test_applying_twice_is_the_second_alone_and_contexts_nest():
    model, other, x = vits.vit(), vits.vit(), vits.pictures()
    old = apply_token_merging(model, ViTConfig(r=3))
    apply_token_merging(model, R)
    apply_token_merging(other, R)
    old.remove()
    with torch.no_grad():
        expected = vits.tokens(other, x)
        assert torch.equal(vits.tokens(model, x), expected)
        with token_merging(model, ViTConfig(r=1)):
            assert vits.tokens(model, x).shape[1] == 33
        assert torch.equal(vits.tokens(model, x), expected)


@pytest.mark.parametrize(
    ("model", "config", "error", "message"),
    [
        (nn.Linear(1, 1), R, UnsupportedModelError, "found Linear; pass a model of .* ViTModel"),
        (vits.vit(), ToMeConfig(), UnsupportedModelError, "ViTModel, which takes a ViTConfig"),
        (vits.vit(), 8, UnsupportedModelError, "takes a ViTConfig"),
        (vits.vit(), ViTConfig(r=[1, 2]), ConfigError, "expected 4 numbers"),
        (vits.vit(num_hidden_layers=0), R, NothingToMergeError, "ViTModel has no layers"),
    ],
)
def test_errors(model, config, error, message):
    for apply in (apply_token_merging, lambda *arguments: token_merging(*arguments).__enter__()):
        with pytest.raises(error, match=message):
            apply(model, config)


def test_removing_from_something_else_is_an_error():
    with pytest.raises(UnsupportedModelError, match="found Linear; pass a diffusers pipeline"):
        remove_token_merging(nn.Linear(1, 1))


def test_attention_that_cannot_add_sizes_is_refused_before_anything_changes_and_at_a_call():
    model = vits.vit()
    before = state(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        UnsupportedModelError, match=r"'flash_attention_2' attention .*set_attn_implementation"
    ):
        apply_token_merging(model, R)
    assert state(model) == before
    apply_token_merging(model, ViTConfig(r=6, proportional_attention=False))
    model.config._attn_implementation = "sdpa"
    apply_token_merging(model, R)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="'flex_attention'"):
        model(vits.pictures())


@torch.no_grad()
def test_a_mask_is_refused_where_tokens_merge_and_nowhere_else():
    model, x = vits.vit(), vits.pictures()
    mask = torch.ones(2, 37).index_fill(1, torch.tensor([5]), 0)
    masked = vits.tokens(model, x, attention_mask=mask)
    with token_merging(model, ViTConfig(r=0)):
        assert torch.equal(vits.tokens(model, x, attention_mask=mask), masked)
    with token_merging(model, R):
        for call in (model, lambda x, attention_mask: model.layers[0](model.embeddings(x), attention_mask)):
            with pytest.raises(UnsupportedModelError, match="attention_mask: a mask of shape"):
                call(x, attention_mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("make", [vits.dinov2, vits.timm])
@torch.no_grad()
def test_exports(make):
    """During export, transformers makes a mask that lets all tokens attend to all others."""
    model, x = make(), vits.pictures()
    apply_token_merging(model, R)
    exported = torch.export.export(model, (x,)).module()
    assert_close(vits.tokens(exported, x), vits.tokens(model, x))


class Tokens(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return vits.tokens(self.model, x)


def _by_trace(model: nn.Module, x: torch.Tensor, path: Path) -> Callable:
    return torch.jit.trace(model, x, check_trace=False)


def _by_older_onnx(model: nn.Module, x: torch.Tensor, path: Path) -> Callable:
    torch.onnx.export(model, (x,), path / "vit.onnx", dynamo=False)
    session = onnxruntime.InferenceSession(path / "vit.onnx", providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _by_openvino(model: nn.Module, x: torch.Tensor, path: Path) -> Callable:
    openvino = pytest.importorskip("openvino")
    converted = openvino.convert_model(model, example_input=x)
    run = openvino.Core().compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda x: torch.from_numpy(run([x.numpy()])[0])


@pytest.mark.filterwarnings("ignore")  # of PyTorch about tracing, of transformers about its own names
@pytest.mark.parametrize(
    ("make", "how"),
    # ONNX Runtime does not load what PyTorch's older export writes of timm's model.
    [
        (vits.vit, _by_trace),
        (vits.vit, _by_older_onnx),
        pytest.param(vits.vit, _by_openvino, marks=pytest.mark.slow),
        (vits.timm, _by_trace),
        pytest.param(vits.timm, _by_openvino, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_traced_model_merges_the_tokens_of_each_picture(make, how, tmp_path):
    """Nothing is drawn and nothing is kept between calls, so a trace has all that the model does.

    The three programs round differently. An image whose tokens merge otherwise would differ by more.
    """
    model, x = make(), vits.pictures()
    apply_token_merging(model, R)
    traced = how(Tokens(model).eval(), x, tmp_path)
    other = x.flip(0, 2)
    assert_close(traced(other), vits.tokens(model, other), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_picture_without_two_patches_is_refused():
    model = vits.vit()
    apply_token_merging(model, R)
    with pytest.raises(NothingToMergeError, match=r"has 1 tokens besides the 1 that never merge"):
        model(vits.pictures(size=4), interpolate_pos_encoding=True)


def test_layers_laid_out_otherwise_are_refused_and_nothing_is_changed():
    model = vits.vit()
    del model.layers[2].mlp
    before = state(model)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.2: expected a ViTLayer .* transformers 5.*, got: .*`?mlp"
    ):
        apply_token_merging(model, R)
    assert state(model) == before

    for name in ("ParallelScalingBlock", "DiffParallelScalingBlock", "ParallelThingsBlock"):
        other = vits.timm(block_fn=getattr(vits.timm_vits(), name), qk_norm=False)
        before = state(other)
        with pytest.raises(
            UnsupportedModelError,
            match=rf"blocks\.0 is a {name}\. .* class Block or ResPostBlock; pass a model with such layers",
        ):
            apply_token_merging(other, R)
        assert state(other) == before

    class Pipeline:
        def __init__(self) -> None:
            self.unet, self.image_encoder = hosts.unet(), other

    with token_merging(Pipeline(), ToMeConfig(ratio=0.5)):  # which does not need the image encoder
        pass


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # PEFT asks transformers for it
@torch.no_grad()
def test_adapters_that_come_before_or_after_and_leave():
    """PEFT replaces the linear layers that return the keys, and later puts other ones back."""
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        targets = ["q_proj", "k_proj", "fc1"]
        config = peft.LoraConfig(
            target_modules=targets, init_lora_weights=False, modules_to_save=["layernorm_after"]
        )
        return peft.get_peft_model(model, config).eval()

    x = vits.pictures()
    before = adapted(vits.vit())
    patch = apply_token_merging(before, R)
    merged = before(pixel_values=x).last_hidden_state
    assert merged.shape[1] == 13
    after = vits.vit()
    apply_token_merging(after, R)
    after = adapted(after)
    assert torch.equal(after(pixel_values=x).last_hidden_state, merged)
    with after.disable_adapter(), token_merging(plain := vits.vit(), R):
        assert torch.equal(after(pixel_values=x).last_hidden_state, plain(x).last_hidden_state)

    fused = before.merge_and_unload()
    assert_close(fused(pixel_values=x).last_hidden_state, merged)
    patch.remove()
    assert not any("_tokenmerge" in m.__dict__ for m in fused.modules())
    assert fused(pixel_values=x).last_hidden_state.shape[1] == 37
    plain = after.unload()
    remove_token_merging(plain)
    assert not any("_tokenmerge" in m.__dict__ for m in plain.modules())
    assert torch.equal(plain(x).last_hidden_state, vits.vit()(x).last_hidden_state)


@pytest.mark.parametrize(
    "settings",
    [
        {"global_pool": "token", "class_token": True},
        {"global_pool": "avg"},
        {"global_pool": "map", "reg_tokens": 4},
        {"attn_layer": "diff", "class_token": True, "global_pool": "token"},
        {"scale_attn_norm": True, "scale_mlp_norm": True, "pre_norm": True},
        {"dynamic_img_size": True, "dynamic_img_pad": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_kinds_of_vision_transformers_of_timm(settings):
    model = vits.timm(num_classes=3, **settings)
    x, protected = vits.pictures(), model.num_prefix_tokens
    dense = model(x)
    with token_merging(model, ViTConfig(r=0)):
        assert torch.equal(model(x), dense)
    with token_merging(model, R) as patch, patch.record() as recorded:
        assert not torch.equal(model(x), dense)
    assert list(recorded.values())[-1].sizes.shape[1] == 12 + protected
    assert torch.equal(model(x), dense)


@torch.no_grad()
def test_feature_maps_of_timm():
    model, x = vits.timm(class_token=True, reg_tokens=2), vits.pictures()
    with token_merging(model, R):
        wanted = [y[:, 3:].transpose(1, 2).unflatten(2, (6, 6)) for y in tokens_of_layers(model, x)]
        final, maps = model.forward_intermediates(x)
        assert final.shape == (2, 39, 32)
        assert all(map(torch.equal, maps, wanted))
        assert all(map(torch.equal, model.get_intermediate_layers(x, n=[0, 2], reshape=True), wanted[::2]))
        early = model.forward_intermediates(x, indices=[1], stop_early=True, intermediates_only=True)
        assert torch.equal(early[0], wanted[1])
        assert model(x).shape[1] == 15  # another call than those that collect
        with pytest.raises(AssertionError):
            model.forward_intermediates(x, indices=[9])
        assert model(x).shape[1] == 15

        compiled = torch.compile(model.forward_intermediates, backend="eager")
        assert all(map(torch.equal, compiled(x)[1], wanted))

    getter = vits.timm_features().FeatureGetterNet(model, out_indices=[0, 2])
    with token_merging(getter, R):
        assert all(map(torch.equal, getter(x), wanted[::2]))


def test_decreasing_schedules_reach_the_layers():
    with token_merging(vits.vit(), ViTConfig(r=DecreasingSchedule(6))) as patch:
        report = patch.report()
    assert [row.tokens - row.merged_tokens for row in report.rows] == [12, 8, 4, 0]
