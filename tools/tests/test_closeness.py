from __future__ import annotations

import math
import re
import sys

import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from tokenmerge.errors import MissingExtraError
from tokenmerge.origin import installable
from tokenmerge_tools.closeness import psnr, ssim


def pictures(height=40, width=56):
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(3, 3, height, width, generator=generator)
    noise = torch.randn(reference.shape, generator=generator)
    strengths = torch.tensor([0.02, 0.1, 0.3])[:, None, None, None]
    return (reference + strengths * noise).clamp(0, 1), reference


def channels_last(batch):
    return [picture.permute(1, 2, 0).double().numpy() for picture in batch]


def test_psnr_is_scikit_image_s():
    images, reference = pictures()
    expected = [
        peak_signal_noise_ratio(true, test, data_range=1)
        for true, test in zip(channels_last(reference), channels_last(images), strict=True)
    ]
    torch.testing.assert_close(psnr(images, reference), torch.tensor(expected), check_dtype=False)


@pytest.mark.parametrize("size", [(40, 56), (11, 11)])
def test_ssim_is_scikit_image_s(size):
    images, reference = pictures(*size)
    expected = [
        structural_similarity(
            true,
            test,
            data_range=1,
            channel_axis=2,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        for true, test in zip(channels_last(reference), channels_last(images), strict=True)
    ]
    torch.testing.assert_close(
        ssim(images, reference), torch.tensor(expected), check_dtype=False, atol=1e-5, rtol=1e-4
    )


def test_equal_pictures_have_infinite_psnr_and_ssim_one():
    _, reference = pictures()
    assert all(math.isinf(value) for value in psnr(reference, reference))
    torch.testing.assert_close(ssim(reference, reference), torch.ones(3))


def test_one_figure_per_picture_whatever_the_batch():
    images, reference = pictures()
    for measure in (psnr, ssim):
        alone = torch.cat([measure(images[i : i + 1], reference[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(measure(images, reference), alone)


def test_a_batch_of_another_shape_is_refused():
    images, reference = pictures()
    for measure in (psnr, ssim):
        with pytest.raises(ValueError, match=r"same shape.*\(2, 3, 40, 56\)"):
            measure(images[:2], reference)


def test_pictures_smaller_than_the_window_are_refused():
    with pytest.raises(ValueError, match="at least 11 × 11"):
        ssim(torch.rand(1, 3, 10, 40), torch.rand(1, 3, 10, 40))


def test_without_torchmetrics_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.image", None)
    with pytest.raises(
        MissingExtraError, match=re.escape(f'pip install "{installable("tokenmerge-tools[metrics]")}"')
    ):
        psnr(*pictures())
