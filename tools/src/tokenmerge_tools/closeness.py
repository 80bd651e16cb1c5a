"""Closeness of a merged picture or video to the dense one with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.errors import MissingExtraError

_SSIM_WINDOW = 11


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, one value per picture; higher is closer.

    Args:
        images: [b, 3, h, w], values in [0, 1].
        reference: the same shape and range.

    Returns:
        [b]; infinite if a picture equals its reference in every pixel.

    Raises:
        MissingExtraError: torchmetrics is not installed.
        ValueError: the shapes differ or are not [b, c, h, w].
    """
    measure = _torchmetric("peak_signal_noise_ratio")
    _check(images, reference)
    return measure(images, reference, data_range=1.0, reduction="none", dim=(1, 2, 3))


def ssim(images: Tensor, reference: Tensor) -> Tensor:
    """Structural similarity with a Gaussian window of 11 × 11 pixels (σ = 1.5), one value per picture.

    The mean is over the windows that lie wholly inside the picture, as in Wang et al. (2004) and in
    scikit-image. By default, torchmetrics also averages over a mirrored border.

    Args:
        images: [b, 3, h, w], values in [0, 1]; h and w ≥ 11.
        reference: the same shape and range.

    Returns:
        [b]; at most 1, the value of equal pictures.

    Raises:
        MissingExtraError: torchmetrics is not installed.
        ValueError: the shapes differ, are not [b, c, h, w], or are smaller than the window.
    """
    measure = _torchmetric("structural_similarity_index_measure")
    _check(images, reference)
    if min(images.shape[-2:]) < _SSIM_WINDOW:
        raise ValueError(f"SSIM needs pictures of at least 11 × 11 pixels, got shape {tuple(images.shape)}")
    _, similarity = measure(images, reference, data_range=1.0, sigma=1.5, return_full_image=True)
    border = _SSIM_WINDOW // 2
    return similarity[..., border:-border, border:-border].mean(dim=(1, 2, 3))


def motion(frames: Tensor, reference: Tensor) -> Tensor:
    """The motion of a video relative to that of its reference: ‖Δ‖ / ‖Δ_reference‖.

    Δ are the differences of consecutive frames, over all pixels. PSNR does not reveal a frozen video: if
    little moves, a still picture is close to every frame.

    Args:
        frames: [f, 3, h, w].
        reference: the same shape and range.

    Returns:
        One number ≥ 0: 0 for a frozen video, 1 for one that moves as much as the reference. NaN or infinite
        if the reference itself does not move.

    Raises:
        ValueError: the shapes differ or are not [f, c, h, w].
    """
    moves, reference_moves = _motions(frames, reference)
    return moves.norm() / reference_moves.norm()


def motion_error(frames: Tensor, reference: Tensor) -> Tensor:
    """The relative error of a video's motion: ‖Δ − Δ_reference‖ / ‖Δ_reference‖.

    The arguments and errors are as for :func:`motion`.

    Returns:
        One number ≥ 0: 0 for the same motion, 1 for a frozen video. NaN or infinite if the reference itself
        does not move.
    """
    moves, reference_moves = _motions(frames, reference)
    return (moves - reference_moves).norm() / reference_moves.norm()


def _motions(frames: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    _check(frames, reference)
    return frames.diff(dim=0), reference.diff(dim=0)


def _torchmetric(name: str) -> Callable[..., Any]:
    try:
        import torchmetrics.functional.image
    except ImportError as error:
        raise MissingExtraError("tokenmerge-tools[metrics]", needed_by="PSNR and SSIM") from error
    measure: Callable[..., Any] = getattr(torchmetrics.functional.image, name)
    return measure


def _check(images: Tensor, reference: Tensor) -> None:
    if images.ndim != 4 or images.shape != reference.shape:
        raise ValueError(
            f"expected two batches of the same shape [b, c, h, w], got {tuple(images.shape)} "
            f"and {tuple(reference.shape)}"
        )
