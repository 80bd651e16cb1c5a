"""Messages name what the user gave: the default method, a preset or a file, and not what it chose."""

from __future__ import annotations

import functools
import json
import warnings
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
import torch
from diffusers import DDIMScheduler
from tests.models.tiny import FAMILIES

from tokenmerge import Correction, StepReuse, ToMeConfig, UnsupportedModelError, apply_token_merging
from tokenmerge.config import save_config
from tokenmerge.models.families import ltx
from tokenmerge.plans import pays_from

REUSE = ToMeConfig(ratio=0.5, reuse=StepReuse(every=3))
OWN = "or pass settings of your own, such as ToMeConfig(ratio=0.5)"


@pytest.fixture(params=["the default method", "a file", "own settings"])
def patched(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[Any, str, str]:
    """A patched UNet with step reuse, what its user gave, and what its user can do instead."""
    unet = hosts.unet()
    pipe = SimpleNamespace(unet=unet, scheduler=DDIMScheduler())
    if request.param == "a file":
        save_config(REUSE, tmp_path / "tuned.json")
        patch = apply_token_merging(pipe, tmp_path / "tuned.json")
        return patch, "'tuned.json' with reuse.every=3", "in 'tuned.json'"
    if request.param == "own settings":
        return apply_token_merging(pipe, REUSE), "reuse.every=3", "or take reuse.every=1"
    return apply_token_merging(pipe, speedup=2.0), "the default method", OWN


def call(patch: Any, **changes: Any) -> str:
    """The message of the error of a call of the patched model."""
    (unet,) = patch._states
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        unet(**{**hosts.inputs(), **changes})
    return str(caught.value)


def names_only(message: str, given: str, way_out: str) -> None:
    assert given in message
    assert way_out in message
    assert given != "the default method" or "reuse." not in message.replace(way_out, "")


def test_where_no_scheduler_tells_the_step(patched):
    patch, given, way_out = patched
    patch._states[next(iter(patch._states))].pipeline._reference = None
    with torch.no_grad():
        message = call(patch)
    assert message.startswith(given)
    names_only(message, given, way_out.replace("take reuse.every=1", "leave that setting out"))


def test_a_call_under_gradients(patched):
    patch, given, way_out = patched
    patch.at_step(0, 20)
    names_only(call(patch), given, way_out)


def test_a_generation_that_is_dense_names_no_setting_that_was_not_given(monkeypatch):
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(1000))
    unet = hosts.unet()
    patch = apply_token_merging(SimpleNamespace(unet=unet, scheduler=DDIMScheduler()))
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        patch.at_step(0, 2)
        unet(**hosts.inputs())
    (told,) = [str(warning.message) for warning in caught]
    assert told == (
        "speedup=2: nothing can be saved in 2 steps on 16 × 16 tokens, so this generation is dense; take "
        "more steps or a larger image"
    )


def test_a_cache_of_diffusers():
    from diffusers import FirstBlockCacheConfig

    family = FAMILIES["FluxTransformer2DModel"]
    transformer = family.build()
    transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    pipe = SimpleNamespace(transformer=transformer, scheduler=DDIMScheduler())
    with pytest.raises(UnsupportedModelError) as caught:
        apply_token_merging(pipe, speedup=2.0)
    assert "the default method leaves blocks out" in str(caught.value)
    assert f"model.disable_cache(), {OWN}" in str(caught.value)


def test_a_sample_with_too_few_tokens():
    family = FAMILIES["LTXVideoTransformer3DModel"]
    transformer = family.build()
    for settings, given, way_out in (
        ("tomesd", "'tomesd' with ratio=0.5", OWN),
        (ToMeConfig(min_tokens=99), "ratio=0.5 with cells of", "lower min_tokens, sx and sy, or raise ratio"),
    ):
        apply_token_merging(transformer, settings)
        with pytest.raises(ValueError, match="nothing to merge") as caught, torch.no_grad():
            transformer(**family.inputs(1, 1, 1))
        assert given in str(caught.value)
        assert str(caught.value).endswith(way_out)


def test_a_model_that_can_leave_nothing_out_refuses_a_file_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(ltx, "listed", functools.partial(ltx.listed, skippable=False))
    transformer = FAMILIES["LTXVideoTransformer3DModel"].build()
    file = tmp_path / "tuned.json"
    save_config(REUSE, file)
    assert json.loads(file.read_text())["settings"]["reuse"]["every"] == 3
    with pytest.raises(TypeError, match=r"'tuned.json' with reuse.every=3: no part .* in 'tuned.json'"):
        apply_token_merging(transformer, file)
    with pytest.raises(TypeError, match=r"^reuse.every=3: no part of .*; take reuse.every=1$"):
        apply_token_merging(transformer, REUSE)


def test_corrections_are_named_only_to_those_who_set_them():
    patch = apply_token_merging(hosts.unet(), ToMeConfig(ratio=0.5, correction=Correction(every=2)))
    patch.at_step(0, 20)
    assert call(patch).startswith("correction.every=2 caches results")
