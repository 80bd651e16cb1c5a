from __future__ import annotations

import pytest
import torch
from PIL import Image
from tools.tests.play.made_up_trial import trial

from tokenmerge.errors import ConfigError
from tokenmerge_tools.play import texts
from tokenmerge_tools.play.trials import Fewer


def test_the_tiles_show_times_speed_and_closeness():
    shown = texts.tiles(trial(seconds=(3, 2), psnr=35.44))
    for figure in ("3.00 s", "2.00 s", "1.50×", "35.4 dB"):
        assert f"<dd>{figure}</dd>" in shown


def test_fewer_steps_and_the_plan_stand_beside():
    assert "steps" not in texts.tiles(trial())
    fewer = Fewer(Image.new("RGB", (4, 4)), 11, 2.1, 27.44)
    assert "<dt>Dense, 11 steps</dt><dd>2.10 s, 27.4 dB</dd>" in texts.tiles(trial(fewer=fewer))
    lines = ["model: aims", "  plan: Df", "        D in 1 step: whole", "  merging: none"]
    assert texts.plan(trial(summary="\n".join(lines))) == "plan: Df\nD in 1 step: whole"
    assert texts.plan(trial()) == "every step is full"


def test_a_picture_without_merging_says_so():
    assert "No token merged in this image." in texts.groups(trial(groups_text="nothing was merged"))
    assert "One border, one merged token: 256 to 128." in texts.groups(trial(groups_text="256 to 128"))


def test_identical_pictures_are_called_so():
    assert "<dd>identical</dd>" in texts.tiles(trial(psnr=float("inf")))


def test_the_caption_has_all_settings():
    shown = texts.caption(trial(method="toma", ratio=0.25, size=(192, 128), seed=7, steps=9, guidance=2.5))
    for part in (
        "toma, ratio 0.25",
        "a red apple",
        "emoji-unet",
        "seed 7",
        "192×128",
        "9 steps",
        "guidance 2.5",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("size: got <b>"), "size: got &lt;b&gt;"),
        (torch.OutOfMemoryError("CUDA out of memory"), "There is too little memory"),
        (
            RuntimeError("shapes differ.\nmore <i>"),
            "The model failed: shapes differ. See the terminal for details.",
        ),
        (KeyError(), "The model failed: KeyError. See the terminal for details."),
    ],
)
def test_errors_are_sentences(error, text):
    shown = texts.sentence(error)
    assert shown.startswith(text)
    assert "\n" not in shown
    assert "<" not in shown
