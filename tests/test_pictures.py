from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tokenmerge.pictures import Row, comparison, difference, difference_gain, draw_groups


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


def test_a_group_gets_its_mean_colour_inside_and_a_border_around():
    source = picture(64, 64)
    labels = np.array([[0, 0], [2, 3]])
    drawn = np.asarray(draw_groups(source, labels))
    pixels = np.asarray(source, dtype=float)
    mean = np.rint(pixels[:32].mean(axis=(0, 1)))
    assert np.all(np.abs(drawn[:31] - mean) <= 1)  # the last row of the group is its border
    assert len(np.unique(drawn[31], axis=0)) == 1
    assert not np.array_equal(drawn[31, 0], drawn[30, 0])


def test_tokens_that_are_not_merged_keep_their_pixels():
    source = picture(64, 64)
    drawn = np.asarray(draw_groups(source, np.array([[0, 0], [2, 3]])))
    assert np.array_equal(drawn[32:], np.asarray(source)[32:])
    alone = np.arange(16).reshape(4, 4)
    assert np.array_equal(np.asarray(draw_groups(source, alone)), np.asarray(source))


def test_parts_of_one_group_that_lie_apart_share_colour_and_border():
    labels = np.array([[7, 1, 7], [1, 1, 1]])
    drawn = np.asarray(draw_groups(picture(60, 40), labels))
    assert np.array_equal(drawn[:20, :20], drawn[:20, 40:][:, ::-1])
    assert not np.array_equal(drawn[0, 19], drawn[0, 20])  # two borders meet there


def test_the_border_of_a_label_does_not_depend_on_the_other_groups():
    one = np.asarray(draw_groups(flat(0, 40), np.array([[5, 5], [6, 7]])))
    two = np.asarray(draw_groups(flat(0, 40), np.array([[5, 5], [0, 0]])))
    assert np.array_equal(one[19], two[19])
    assert one[19].any()


def test_a_grid_that_does_not_divide_the_picture_covers_it():
    drawn = np.asarray(draw_groups(picture(50, 30), np.zeros((7, 11), dtype=np.int64)))
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) == 1


def test_the_comparison_has_four_enlarged_panels_per_row():
    labels = np.arange(16).reshape(4, 4)
    rows = [Row(picture(32, 32, seed), picture(32, 32, seed), labels) for seed in (0, 1)]
    drawn = comparison(rows)
    large = np.asarray(rows[1].dense.resize((320, 320), Image.Resampling.NEAREST))
    pixels = np.asarray(drawn)
    top = drawn.height - 24 - 320
    lefts = [24 + column * (320 + 16) for column in range(4)]
    for column in (0, 1, 3):  # nothing differs and nothing is merged here
        left = lefts[column]
        assert np.array_equal(pixels[top : top + 320, left : left + 320], large)
    assert not pixels[top : top + 320, lefts[2] : lefts[2] + 320].any()
    assert drawn.width == lefts[3] + 320 + 24


def test_a_white_picture_is_told_from_the_paper():
    row = Row(flat(255, 320), flat(255, 320), np.zeros((1, 1), dtype=np.int64))
    pixels = np.asarray(comparison([row]))
    top = len(pixels) - 24 - 320
    assert (pixels[top + 10, 20:30] < 230).any()
    assert (pixels[top - 4 : top + 4, 30] < 230).any()


def test_large_pictures_are_not_enlarged():
    row = Row(picture(400, 330), picture(400, 330, 1), np.zeros((1, 1), dtype=np.int64))
    assert comparison([row]).width == 2 * 24 + 4 * 400 + 3 * 16


def test_titles_are_drawn():
    row = Row(flat(0, 320), flat(9, 320), np.zeros((1, 1), dtype=np.int64), caption="seed 0")
    head = np.asarray(comparison([row]).crop((0, 0, 4 * 336, 72)))
    bare = np.asarray(comparison([row], dense="25 steps").crop((0, 0, 4 * 336, 72)))
    for column in range(4):
        assert (head[:, 24 + column * 336 : 24 + column * 336 + 320] < 100).any()
    assert not np.array_equal(head, bare)
