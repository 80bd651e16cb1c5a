from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tokenmerge.images import draw_groups


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def flat(value, side=8):
    return Image.new("RGB", (side, side), (value, value, value))


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


def test_the_module_has_its_former_name_too():
    with pytest.warns(DeprecationWarning, match=r"tokenmerge\.images\.draw_groups"):
        from tokenmerge.pictures import draw_groups as former
    assert former is draw_groups
