"""Files and arguments with large numbers are refused in one line, or handled in a bounded time."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
from diffusers import DDIMScheduler
from tests.models.tiny import FAMILIES
from tests.plans.test_choose import facts
from tests.tuned import tuned

from tokenmerge import ConfigError, ToMeConfig, apply_token_merging
from tokenmerge.config.checks import MOST_STEPS
from tokenmerge.errors import TokenMergingError
from tokenmerge.plans import plan_for

SECONDS = 20.0  # that no single step of applying or planning takes on a busy machine; without bounds, minutes


def pipeline(denoiser: Any = None) -> Any:
    return SimpleNamespace(unet=denoiser or hosts.unet(), scheduler=DDIMScheduler())


def file_of_tune(folder: Any, **changes: Any) -> str:
    content = tuned().content()
    content["for"] |= changes
    path = folder / "tuned.json"
    path.write_text(json.dumps(content))
    return str(path)


def file_of_settings(folder: Any, **settings: Any) -> str:
    path = folder / "settings.json"
    path.write_text(json.dumps({"version": 1, "settings": settings}))
    return str(path)


@pytest.mark.parametrize("steps", [2**62, 100_000, MOST_STEPS + 1])
def test_a_file_of_tune_for_too_many_steps_is_refused(tmp_path, steps):
    with pytest.raises(ConfigError, match=rf"for.steps: expected an integer ≥ 1 and ≤ 5,000, got {steps}"):
        apply_token_merging(pipeline(), file_of_tune(tmp_path, steps=steps))


def test_so_are_such_arguments():
    patch: Any = apply_token_merging(hosts.unet(), ToMeConfig(ratio=0.5))
    for call in (lambda: patch.report(steps=2**62), lambda: patch.at_step(3, 2**40)):
        with pytest.raises(ConfigError, match="steps: expected an integer ≥ 1 and ≤ 5,000, got"):
            call()


@pytest.mark.parametrize("changes", [{"start": 0.5}, {"level": 2}])
def test_too_many_rules_are_refused(tmp_path, changes):
    rules = [{**changes, "ratio": 0.25}] * 101
    with pytest.raises(ConfigError, match="rules: expected at most 100 rules, got 101"):
        apply_token_merging(pipeline(), file_of_settings(tmp_path, rules=rules))


def test_too_many_places_are_refused(tmp_path):
    places = [i / 20_000 for i in range(20_000)]
    with pytest.raises(ConfigError, match=r"reuse.full_steps: expected at most 5,000 places, got 20,000"):
        apply_token_merging(pipeline(), file_of_settings(tmp_path, **{"reuse.full_steps": places}))


def test_as_many_rules_as_allowed_are_checked_in_a_short_time():
    began = time.process_time()
    ToMeConfig(rules=[{"start": i / 200, "level": i + 1, "ratio": i / 200} for i in range(100)])
    assert time.process_time() - began < SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("model", ["unet", "transformer"])
def test_as_many_steps_as_allowed_are_planned_in_a_short_time(model):
    began = time.process_time()
    plan = plan_for(facts(model, steps=MOST_STEPS), 2.0)
    assert 2 <= plan.speedup < 3
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("size", [10**5, 10**9, 2**62, 10**30])
@pytest.mark.parametrize(
    "name", ["UNet2DConditionModel", "SD3Transformer2DModel", "PixArtTransformer2DModel"]
)
@pytest.mark.parametrize("how", [{"speedup": 2.0}, {"ratio": 0.5}])
def test_a_default_size_that_is_too_large_is_refused_in_one_line(name, size, how):
    model = hosts.unet() if name == "UNet2DConditionModel" else FAMILIES[name].build()
    model.register_to_config(sample_size=size)
    with pytest.raises(TokenMergingError, match="height, width: ") as caught:
        apply_token_merging(pipeline(model), **how).report()
    assert "\n" not in str(caught.value)
