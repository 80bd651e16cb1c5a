from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tokenmerge_tools.sheets import Pair, comparison, difference, difference_gain


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def flat(value, side=8):
    return Image.new("RGB", (side, side), (value, value, value))


def test_difference_is_absolute_amplified_and_clipped():
    dense, merged = flat(100), flat(97)
    assert np.all(np.asarray(difference(dense, merged, 4)) == 12)
    assert np.all(np.asarray(difference(merged, dense, 4)) == 12)
    assert np.all(np.asarray(difference(flat(0), flat(200), 2)) == 255)


@pytest.mark.parametrize(("apart", "gain"), [(0, 64), (3, 64), (4, 32), (100, 2), (255, 1)])
def test_gain_is_the_largest_power_of_two_that_does_not_clip(apart, gain):
    assert difference_gain(flat(0), flat(apart)) == gain


def test_differences_stand_below_the_enlarged_pictures():
    rows = [Pair(picture(32, 32, seed), picture(32, 32, seed), picture(32, 32, seed + 9)) for seed in (0, 1)]
    drawn = comparison(rows)
    pixels = np.asarray(drawn)
    tops = [80 + line * (320 + 30 + 16) for line in range(4)]
    lefts = [24 + column * (320 + 16) for column in range(3)]
    panels = {(top, left): pixels[top : top + 320, left : left + 320] for top in tops for left in lefts}
    for left, panel in zip(lefts, (rows[1].dense, rows[1].merged, rows[1].fewer), strict=True):
        large = np.asarray(panel.resize((320, 320), Image.Resampling.NEAREST))
        assert np.array_equal(panels[tops[2], left], large)
    assert (panels[tops[3], lefts[0]] == 255).all()  # dense has no difference to itself
    assert not panels[tops[3], lefts[1]].any()  # the first two do not differ
    assert panels[tops[3], lefts[2]].any()  # the picture in fewer steps does
    assert drawn.size == (lefts[2] + 320 + 24, tops[3] + 320 + 30 + 24)


def test_a_white_picture_is_told_from_the_paper():
    row = Pair(flat(255, 320), flat(255, 320))
    pixels = np.asarray(comparison([row]))
    top = 80
    assert (pixels[top + 10, 20:30] < 230).any()
    assert (pixels[top - 4 : top + 4, 30] < 230).any()


def test_large_pictures_are_not_enlarged():
    row = Pair(*(picture(400, 330, seed) for seed in range(3)))
    assert comparison([row]).width == 2 * 24 + 3 * 400 + 2 * 16


def test_without_pictures_in_fewer_steps_there_are_two_columns():
    row = Pair(picture(400, 330), picture(400, 330, 1))
    assert comparison([row]).width == 2 * 24 + 2 * 400 + 16


def test_titles_are_drawn():
    row = Pair(flat(0, 320), flat(9, 320), flat(5, 320), captions=["seed 0"])
    head = np.asarray(comparison([row]).crop((0, 0, 3 * 336, 72)))
    bare = np.asarray(comparison([row], dense="25 steps").crop((0, 0, 3 * 336, 72)))
    for column in range(3):
        assert (head[:, 24 + column * 336 : 24 + column * 336 + 320] < 100).any()
    assert not np.array_equal(head, bare)
