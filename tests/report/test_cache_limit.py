"""A limit on what is cached between steps."""

import dataclasses
import math
import re

import hosts
import pytest
import torch
from tests.models.test_every_family import model_of
from tests.models.tiny import FAMILIES

from tokenmerge import ConfigError, Correction, PlanSharing, StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.planners import calibration
from tokenmerge.report import predict
from tokenmerge.report.cache_limit import bytes_of, change_within, counted_cache, in_words

FLUX = FAMILIES["FluxTransformer2DModel"]
EVERYTHING = ToMeConfig(
    ratio=0.5,
    max_downsample=8,
    correction=Correction(every=2),
    reuse=StepReuse(every=4, shallow_every=2),
)
NOTHING = ToMeConfig(ratio=0.5, max_downsample=8)


def within(model: torch.nn.Module, config: ToMeConfig, limit: int) -> tuple[ToMeConfig, str]:
    """The settings that fit, and what is left out."""
    change, text = change_within(model, [config], limit)
    return change(config), text


def cache_of(model: torch.nn.Module, config: ToMeConfig) -> int:
    return counted_cache(model, [config])


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("200MB", 200_000_000),
        ("1.5 GB", 1_500_000_000),
        ("61kb", 61_000),
        ("12", 12),
        (12, 12),
        (2.5e6, 2_500_000),
        ("8.2 MB", 8_200_000),  # 8.2 · 10⁶ is less than that in floating point
    ],
)
def test_sizes(given, size):
    assert bytes_of(given) == size


@pytest.mark.parametrize("given", ["", "MB", "1 TB", "-3MB", -3, True, None, float("inf"), [1]])
def test_no_size(given):
    with pytest.raises(ConfigError, match="max_cache: expected a size such as '200MB'"):
        bytes_of(given)


@pytest.mark.slow
def test_parts_are_left_out_until_the_rest_fits():
    """One byte below what the settings need, one more part is left out each time."""
    unet = hosts.unet()
    found, config, text = [], EVERYTHING, ""
    while cache_of(unet, config):
        config, text = within(unet, EVERYTHING, cache_of(unet, config) - 1)
        assert cache_of(unet, config) == predict(unet, config).kept_bytes
        found.append((config.correction.every > 0, config.reuse.skips_finest, config.reuse.on))
    assert found == [(False, True, True), (False, False, True), (False, False, False)]
    assert config == NOTHING
    assert "no correction and no step reuse; with everything, the cache would take" in text


def test_what_fits_stays_as_it_is():
    unet = hosts.unet()
    assert within(unet, EVERYTHING, cache_of(unet, EVERYTHING)) == (EVERYTHING, "")


def test_the_settings_that_cache_most_count():
    unet = hosts.unet()
    corrects = ToMeConfig(ratio=0.5, correction=Correction(every=2))
    assert counted_cache(unet, [NOTHING, corrects]) == cache_of(unet, corrects) > 0


def test_plans_that_are_shared_are_refused_where_they_do_not_fit():
    shared = ToMeConfig(ratio=0.5, plans=PlanSharing(every=3))
    with pytest.raises(ConfigError, match=r"max_cache: expected at least .* got 0.0 MB; with less, no step"):
        within(hosts.unet(), shared, 0)


def test_the_least_size_in_the_error_is_accepted():
    shared, unet = ToMeConfig(ratio=0.5, plans=PlanSharing(every=3)), hosts.unet()
    with pytest.raises(ConfigError) as caught:
        within(unet, shared, cache_of(unet, shared) - 1)
    named = re.search(r"expected at least (.*?),", str(caught.value))
    assert within(unet, shared, bytes_of(named[1])) == (shared, "")


@pytest.mark.parametrize("size", [1, 61_840_001, 8_200_000, 999_999_999, 1_503_238_553, 1_110_000_000])
def test_a_size_that_is_rounded_up_is_enough(size):
    assert 0 <= bytes_of(in_words(size, math.ceil)) - size < 10**7
    assert bytes_of(in_words(size, math.floor)) <= size


def test_features_cost_nothing_beside_step_reuse_and_are_left_out_last():
    """Step reuse caches the residual of all blocks anyway; without it, that is one tensor of the image."""
    model = model_of(FLUX)
    plain = ToMeConfig(ratio=0.5, proportional=True, plans=PlanSharing(blocks=True))
    compares = dataclasses.replace(plain, features="model_residual")
    reuse = {"reuse": StepReuse(every=2), "correction": Correction(every=2)}
    with_reuse = dataclasses.replace(plain, **reuse)
    both = dataclasses.replace(compares, **reuse)
    assert cache_of(model, both) == cache_of(model, with_reuse)
    assert cache_of(model, compares) > cache_of(model, plain) == 0
    needed = cache_of(model, compares)
    assert within(model, both, needed)[0] == compares
    config, text = within(model, both, needed - 1)
    assert config == plain
    assert (
        "no correction, no step reuse and no cached features; with everything, the cache would take" in text
    )


class Pipeline:
    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer, self.scheduler = transformer, object()


def test_the_default_method_takes_what_fits_and_the_handle_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 16)
    monkeypatch.setattr(calibration, "calibrated", lambda *_: 16, raising=False)
    pipe = Pipeline(model_of(FLUX))
    whole = apply_token_merging(pipe, speedup=2.0)
    needed = whole.report().kept_bytes
    assert needed
    patch = apply_token_merging(pipe, speedup=2.0, max_cache=needed // 2)
    assert patch.report().kept_bytes <= needed // 2
    assert re.search(
        rf"speed-up 2 in {needed // 2} \(no .*; with everything, the cache would take", str(patch)
    )


def test_other_settings_do_not_adapt():
    with pytest.raises(ConfigError, match="max_cache: only the default method takes a limit, got '1MB'"):
        apply_token_merging(hosts.unet(), EVERYTHING, max_cache="1MB")
    with pytest.raises(ConfigError, match="max_cache: only the default method"):
        apply_token_merging(hosts.unet(), "toma", max_cache="1MB")
