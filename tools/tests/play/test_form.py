from __future__ import annotations

import dataclasses
import math

import pytest

from tokenmerge.errors import ConfigError
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.play.form import Form


def test_the_fields_become_options():
    form = Form("emoji-unet", " a red apple ", 7.0, "192 x 128", 5.0, "2.5", "toma", 2.0, 0.25)
    options = form.options(device="cpu", dtype="bf16")
    assert (options.model, options.prompt, options.seed) == ("emoji-unet", "a red apple", 7)
    assert (options.size, options.steps, options.guidance) == ((192, 128), 5, 2.5)
    assert options.merging == MethodSpec("toma", {"ratio": 0.25})
    assert (options.device, options.dtype) == ("cpu", "bf16")
    assert type(options.seed) is type(options.steps) is int


def test_what_is_left_empty_is_the_model_s_own():
    options = Form(size=" ", guidance="").options()
    assert options.size is options.guidance is None


@pytest.mark.parametrize("size", ["", "192x128"])
@pytest.mark.parametrize("guidance", ["", "2.5"])
def test_options_become_the_fields_that_they_came_from(size, guidance):
    form = Form("emoji-mmdit", "a pear", 3, size, 9, guidance, "sito", 2.0, 0.4)
    assert Form.of(form.options()) == form


def test_the_first_page_draws_with_a_bundled_model():
    Form.first("emoji-mmdit").options()
    assert Form.first("owner/name").options().size is None


def test_only_the_models_of_the_page_are_drawn_with():
    assert Form().options(("emoji-unet", "owner/name")).model == "emoji-unet"
    with pytest.raises(ConfigError, match="model: expected one of 'owner/name', got 'emoji-unet'"):
        Form().options(("owner/name",))


def test_the_largest_trial_is_allowed():
    form = Form(prompt="x" * 10_000, steps=1_000, size="1024x1024", seed=2**63 - 1)
    assert form.options().size == (1024, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": " "}, "prompt: it is empty"),
        ({"seed": None}, "seed: expected a whole number, got nothing"),
        ({"seed": -1}, "seed"),
        ({"steps": 2.5}, "steps: expected a whole number, got 2.5"),
        ({"steps": 0}, "steps"),
        ({"size": "big"}, "size: expected WIDTHxHEIGHT or one number"),
        ({"guidance": "much"}, "guidance: expected a number such as 3"),
        ({"guidance": "-1"}, "guidance"),
        ({"guidance": "nan"}, "guidance"),
        ({"speedup": None}, "speedup: it is empty"),
        ({"speedup": 0.5}, "speedup"),
        ({"method": "toma", "ratio": None}, "ratio: it is empty"),
        ({"method": "toma", "ratio": 1.5}, "ratio"),
        ({"method": "none"}, "method: expected one of auto"),
        ({"method": ["tome"]}, "method: expected a string"),
        ({"prompt": None}, "prompt: it is empty"),
        ({"prompt": "x" * 10_001}, "prompt: expected at most 10,000 characters, got 10,001; shorten it"),
        ({"steps": 1_001}, "steps: expected an integer from 1 to 1,000, got 1001"),
        ({"steps": True}, "steps: expected a whole number, got True"),
        ({"seed": 1e300}, "seed: expected an integer ≥ 0 that fits into 64 bits"),
        ({"seed": math.inf}, "seed: expected a whole number, got inf"),
        ({"size": "1025x1024"}, "size: expected at most 1,048,576 pixels, such as 1024x1024, got 1025x1024"),
        ({"model": "owner/name", "size": "2049x2048"}, "size: expected at most 4,194,304 pixels"),
        ({"size": 64}, "size: expected a string, got 64"),
        ({"guidance": "1" * 41}, "guidance: expected at most 40 characters, got 41"),
    ],
)
def test_wrong_fields_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        dataclasses.replace(Form(), **changes).options()
    assert len(str(caught.value)) < 400
