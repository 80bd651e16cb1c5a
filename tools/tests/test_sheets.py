from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tokenmerge_tools.sheets import comparison, most_different

COLUMNS = [("dense", ""), ("tokenmerge", ""), ("fewer steps", "")]


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def flat(value, side=8):
    return Image.new("RGB", (side, side), (value, value, value))


def test_the_part_that_differs_most_is_found():
    dense, merged = flat(100, 64), flat(100, 64)
    merged.paste((105, 100, 100), (40, 24, 44, 28))
    fewer = dense.copy()
    fewer.paste((90, 90, 90), (30, 50, 62, 60))
    left, top, right, bottom = most_different(dense, merged)
    assert (right - left, bottom - top) == (22, 22)
    assert left <= 40 < 44 <= right
    assert top <= 24 < 28 <= bottom
    assert most_different(dense, fewer) == (30, 40, 52, 62)
    assert most_different(dense, merged, fewer)[1] >= 24  # the larger difference decides


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (2, 9), (33, 16)])
def test_the_part_lies_within_the_picture(size):
    left, top, right, bottom = most_different(picture(*size), picture(*size, 1))
    assert 0 <= left <= right <= size[0]
    assert 0 <= top <= bottom <= size[1]


def test_the_part_that_differs_stands_below_the_enlarged_pictures():
    rows = [
        ((picture(32, 32, seed), picture(32, 32, seed), picture(32, 32, seed + 9)), "") for seed in (0, 1)
    ]
    drawn = comparison(COLUMNS, rows)
    pixels = np.asarray(drawn)
    tops = [80 + line * (320 + 30 + 16) for line in range(4)]
    lefts = [24 + column * (320 + 16) for column in range(3)]
    panels = {(top, left): pixels[top : top + 320, left : left + 320] for top in tops for left in lefts}
    part = most_different(*rows[1][0])
    box = [10 * side for side in part]
    for left, panel in zip(lefts, rows[1][0], strict=True):
        large, closer = (
            shown.resize((320, 320), Image.Resampling.NEAREST) for shown in (panel, panel.crop(part))
        )
        for colour, width in (("black", 4), ("white", 2)):
            ImageDraw.Draw(large).rectangle(box, outline=colour, width=width)
        assert np.array_equal(panels[tops[2], left], np.asarray(large))
        assert np.array_equal(panels[tops[3], left], np.asarray(closer))
    assert drawn.size == (lefts[2] + 320 + 24, tops[3] + 320 + 30 + 24)


def test_a_white_picture_is_told_from_the_paper():
    row = (flat(255, 320), flat(255, 320)), ""
    pixels = np.asarray(comparison(COLUMNS[:2], [row]))
    top = 80
    assert (pixels[top + 10, 20:30] < 230).any()
    assert (pixels[top - 4 : top + 4, 30] < 230).any()


def test_large_pictures_are_not_enlarged():
    row = [picture(400, 330, seed) for seed in range(3)], ""
    assert comparison(COLUMNS, [row]).width == 2 * 24 + 3 * 400 + 2 * 16


def test_an_odd_size_is_drawn():
    row = [picture(401, 333, seed) for seed in range(2)], ["seed 0"]
    assert comparison(COLUMNS[:2], [row]).width == 2 * 24 + 2 * 401 + 16


def test_titles_are_drawn():
    row = [flat(0, 320), flat(9, 320), flat(5, 320)], ["seed 0"]
    head = np.asarray(comparison(COLUMNS, [row]).crop((0, 0, 3 * 336, 72)))
    bare = np.asarray(comparison([("dense", "25 steps"), *COLUMNS[1:]], [row]).crop((0, 0, 3 * 336, 72)))
    for column in range(3):
        assert (head[:, 24 + column * 336 : 24 + column * 336 + 320] < 100).any()
    assert not np.array_equal(head, bare)
