"""cache-dit as a variant: skips as configured, works with merging in any order, and leaves nothing behind."""

import contextlib
import importlib.util

import numpy as np
import pytest
import torch

from tokenmerge import ToMeConfig, apply_token_merging, token_merging
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.counting import counting
from tokenmerge_tools.pipelines.loading import find_model, load_pipeline, twin
from tokenmerge_tools.variants.variant import VARIANTS, parse_variant

STEPS = 8
DEEP = "transformer_blocks.2.ff"
MERGED = ToMeConfig(ratio=0.5, scope="block", planner="tiled", proportional=True)


@pytest.fixture(scope="module")
def pipe():
    return load()


def load(name="emoji-mmdit"):
    pytest.importorskip("cache_dit")
    pipe = load_pipeline(find_model(name), torch.float32, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    arguments = {"num_inference_steps": steps, "height": 64, "width": 64, "output_type": "np"}
    return pipe("a red apple", generator=generator, **arguments).images


def calls_of(pipe):
    calls = []
    pipe.transformer.get_submodule(DEEP).register_forward_hook(lambda *_: calls.append(1))
    return calls


def spec_of(text):
    (spec,) = parse_variant(text, [0.5])
    return spec


def with_variant(pipe, text):
    copied = twin(pipe)
    calls = calls_of(copied)
    with spec_of(text).apply(copied, None):
        return draw(copied), len(calls)


@contextlib.contextmanager
def cached(pipe, threshold=1.0):
    """Enable cache-dit by its own calls. The pipeline gets a class of its own, which cache-dit changes."""
    import cache_dit

    cls = type(pipe)
    pipe.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})
    settings = {"Fn_compute_blocks": 1, "max_warmup_steps": 4, "residual_diff_threshold": threshold}
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**settings))
    try:
        yield
    finally:
        cache_dit.disable_cache(pipe)
        pipe.__class__ = cls


def state(pipe):
    """Names of all attributes of the pipeline and of its denoiser's modules, and their classes."""
    modules = pipe.transformer.named_modules()
    attributes = {f"{path}.{name}" for path, module in modules for name in module.__dict__}
    types = {f"{path} is a {id(type(module))}" for path, module in pipe.transformer.named_modules()}
    return attributes | types | set(pipe.__dict__) | {f"pipe is a {id(type(pipe))}"}


@pytest.mark.slow
def test_blocks_are_skipped_as_often_as_the_settings_say_and_nothing_is_left(pipe):
    cache_dit = pytest.importorskip("cache_dit")
    dense = draw(pipe)
    copied = twin(pipe)
    before = state(copied)
    calls = calls_of(copied)
    for text, expected in (
        ("cache-dit:threshold=1e-9", STEPS),
        ("cache-dit:threshold=1", STEPS // 2),  # half of the steps are complete
        (
            "cache-dit:threshold=1,mask=fast",
            sum(cache_dit.steps_mask(total_steps=STEPS, mask_policy="fast")),
        ),
    ):
        calls.clear()
        with spec_of(text).apply(copied, None):
            first, second = draw(copied), draw(copied)
            assert np.array_equal(draw(pipe), dense)  # another pipeline of the class is not cached
        assert len(calls) == 2 * expected
        assert np.array_equal(first, second)
        assert np.array_equal(first, dense) == (expected == STEPS)
        assert state(copied) ^ before == set()
    assert np.array_equal(draw(copied), dense)


def test_where_no_step_is_skipped_as_many_operations_are_counted_as_without_a_cache(pipe):
    dense, copied = twin(pipe), twin(pipe)
    with counting(dense.transformer) as wanted:
        draw(dense, steps=5)  # the cache can skip those of the second half
    with spec_of("cache-dit:threshold=1e-9").apply(copied, None), counting(copied.transformer) as found:
        draw(copied, steps=5)
    assert found.flops == wanted.flops > 0
    assert found.calls == wanted.calls == 5


def test_the_taylor_series_changes_the_picture_and_not_which_steps_are_full(pipe):
    plain, calls = with_variant(pipe, "cache-dit:threshold=1")
    extrapolated, as_many = with_variant(pipe, "cache-dit:threshold=1,taylor=1")
    assert calls == as_many
    assert not np.array_equal(plain, extrapolated)


@pytest.mark.slow
def test_merging_composes_with_the_cache_in_both_orders_and_either_can_go_first(pipe):
    dense, pictures = draw(pipe), []
    merged = twin(pipe)
    with token_merging(merged, MERGED):
        merging_alone = draw(merged)
    with cached(merged):
        cache_alone = draw(merged)
    for cache_first in (True, False):
        for cache_leaves_first in (True, False):
            copied = twin(pipe)
            cache = cached(copied)
            if cache_first:
                cache.__enter__()
                patch = apply_token_merging(copied, MERGED)
            else:
                patch = apply_token_merging(copied, MERGED)
                cache.__enter__()
            pictures.append(draw(copied))
            if cache_leaves_first:
                cache.__exit__(None, None, None)
                assert np.array_equal(draw(copied), merging_alone)
                patch.remove()
            else:
                patch.remove()
                assert np.array_equal(draw(copied), cache_alone)
                cache.__exit__(None, None, None)
            assert np.array_equal(draw(copied), dense)
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)
    assert not any(np.array_equal(pictures[0], other) for other in (dense, merging_alone, cache_alone))


def test_at_ratio_0_the_cache_draws_what_it_draws_alone(pipe):
    copied = twin(pipe)
    with cached(copied):
        alone = draw(copied)
        with token_merging(copied, ToMeConfig(ratio=0)):
            assert np.array_equal(draw(copied), alone)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cache-dit:taylor=0.5", "taylor: expected an integer ≥ 1, got 0.5"),
        ("cache-dit:mask=quick", "mask: expected one of slow, medium, fast, ultra, got 'quick'"),
    ],
)
def test_a_setting_out_of_range_names_what_is_allowed(pipe, text, words):
    copied = twin(pipe)
    before = state(copied)
    with pytest.raises(ConfigError, match=words), spec_of(text).apply(copied, None):
        pass
    assert state(copied) ^ before == set()


@pytest.mark.parametrize("steps", [4, 6, 7])
def test_a_mask_is_refused_for_a_number_of_steps_that_has_none(pipe, steps):
    draw(pipe, steps=1)  # leaves attributes
    copied = twin(pipe)
    before = state(copied)
    expected = pytest.raises(ConfigError, match="got 7") if steps == 7 else contextlib.nullcontext()
    with expected, spec_of("cache-dit:mask=fast").apply(copied, None):
        assert draw(copied, steps).shape == (1, 64, 64, 3)
    assert state(copied) ^ before == set()


def test_a_pipeline_that_it_does_not_know_and_a_denoiser_are_refused(pipe):
    with pytest.raises(UnsupportedModelError, match="cache-dit does not support StableDiffusionPipeline"):
        spec_of("cache-dit").apply(load("emoji-unet"), None).__enter__()
    with pytest.raises(ConfigError, match="give a pipeline, not its denoiser"):
        spec_of("cache-dit").apply(pipe.transformer, None).__enter__()


def test_the_settings_are_read_in_any_order_and_each_name_is_one_of_its_own():
    same = [spec_of(f"cache-dit:{text}") for text in ("taylor=1,threshold=0.2", "threshold=0.2, taylor=1")]
    assert same[0] == same[1]
    assert same[0].label == "cache-dit taylor=1 threshold=0.2"
    assert spec_of("cache-dit").label == "cache-dit threshold=0.08"
    for text in ("cache-dit:ratio=0.5", "cache-dit:merge=0.5", "cache-dit:taylor=0", "cache-dit:threshold=x"):
        with pytest.raises(ConfigError, match=r"expected cache-dit:threshold=NUMBER.*mask=fast.*got "):
            spec_of(text)


def test_where_it_is_not_installed_the_message_says_how(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", asked.append)
    assert VARIANTS["cache-dit"].missing() == "cache-dit is not installed; run: pip install cache-dit==1.5.3"
    assert asked == ["cache_dit"]
