from __future__ import annotations

import dataclasses

import pytest

from tokenmerge.errors import ConfigError
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.play.form import Form


def test_the_fields_become_options():
    form = Form("emoji-unet", " a red apple ", 7.0, "192 x 128", 5.0, "2.5", "toma", 0.25)
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
    form = Form("emoji-mmdit", "a pear", 3, size, 9, guidance, "sito", 0.4)
    assert Form.of(form.options()) == form


def test_the_first_page_draws_with_a_bundled_model():
    Form.first("emoji-mmdit").options()
    assert Form.first("owner/name").options().size is None


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
        ({"ratio": None}, "ratio: it is empty"),
        ({"ratio": 1.5}, "ratio"),
        ({"method": "none"}, "method: expected one of auto"),
    ],
)
def test_wrong_fields_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        dataclasses.replace(Form(), **changes).options()
    assert len(str(caught.value)) < 400
