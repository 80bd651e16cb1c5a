from __future__ import annotations

import pytest
import torch
from tools.tests.play.made_up_trial import trial

from tokenmerge.errors import ConfigError
from tokenmerge_tools.play import texts


def test_the_tiles_show_times_speed_and_closeness():
    shown = texts.tiles(trial(seconds=(3, 2), psnr=35.44))
    for figure in ("3.00 s", "2.00 s", "1.50×", "35.4 dB"):
        assert f"<dd>{figure}</dd>" in shown


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
