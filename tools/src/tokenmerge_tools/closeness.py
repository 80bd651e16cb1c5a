"""Closeness of a merged image or video to the dense one with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.errors import MissingExtraError

_SSIM_WINDOW = 11
_SSIM_SIGMA = 1.5
_MOST_SNR = 120.0  # the SNR of equal latents, so that means stay finite
_LEAST_ERROR = 1e-30  # this keeps the quotient finite


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio [b] in dB of images [b, 3, h, w] in [0, 1]; higher is closer.

    It is infinite if an image equals its reference in every pixel.
    """
    measure = _torchmetric("peak_signal_noise_ratio")
    _check(images, reference)
    return measure(images, reference, data_range=1.0, reduction="none", dim=(1, 2, 3))


def ssim(images: Tensor, reference: Tensor) -> Tensor:
    """Return the structural similarity [b] of images [b, 3, h, w] in [0, 1]; 1 for equal images.

    The window is Gaussian, 11 × 11 pixels, σ = 1.5. The mean is over the windows that lie wholly inside the
    image, as in Wang et al. (2004) and in scikit-image. By default, torchmetrics also averages over a
    mirrored border.
    """
    measure = _torchmetric("structural_similarity_index_measure")
    _check(images, reference)
    if min(images.shape[-2:]) < _SSIM_WINDOW:
        raise ValueError(f"SSIM needs images of at least 11 × 11 pixels, got shape {tuple(images.shape)}")
    _, similarity = measure(images, reference, data_range=1.0, sigma=_SSIM_SIGMA, return_full_image=True)
    border = _SSIM_WINDOW // 2
    return similarity[..., border:-border, border:-border].mean(dim=(1, 2, 3))


def snr(latents: Tensor, reference: Tensor) -> float:
    """Return the signal-to-noise ratio in dB of latents of any shape; higher is closer.

    It is the variance of the reference over the mean squared error, and at most 120 dB.
    """
    error = (latents.float() - reference.float()).square().mean()
    decibels = 10 * (reference.float().var() / error.clamp(min=_LEAST_ERROR)).log10()
    return float(decibels.clamp(max=_MOST_SNR))


def motion(frames: Tensor, reference: Tensor) -> Tensor:
    """Return the motion of a video [f, 3, h, w] relative to that of its reference: ‖Δ‖ / ‖Δ_reference‖.

    Δ are the differences of consecutive frames, over all pixels. PSNR does not reveal a frozen video: if
    little moves, a still image is close to every frame. The result is 0 for a frozen video, 1 for as much
    motion as the reference, and not finite if the reference does not move.
    """
    moves, reference_moves = _motions(frames, reference)
    return moves.norm() / reference_moves.norm()


def motion_error(frames: Tensor, reference: Tensor) -> Tensor:
    """Return the relative error of a video's motion: ‖Δ − Δ_reference‖ / ‖Δ_reference‖.

    It is 0 for the same motion, 1 for a frozen video, and not finite if the reference does not move.
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
        raise MissingExtraError(
            "tokenmerge-tools[metrics]", needed_by="PSNR and SSIM need torchmetrics"
        ) from error
    measure: Callable[..., Any] = getattr(torchmetrics.functional.image, name)
    return measure


def _check(images: Tensor, reference: Tensor) -> None:
    if images.ndim != 4 or images.shape != reference.shape:
        raise ValueError(
            f"expected two batches of the same shape [b, c, h, w], got {tuple(images.shape)} "
            f"and {tuple(reference.shape)}"
        )
