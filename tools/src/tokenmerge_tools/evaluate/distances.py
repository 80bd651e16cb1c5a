"""Distances between the features of two sets of pictures, computed by torchmetrics."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

_SUBSETS = 100
_LARGEST_SUBSET = 1000
_SEED = 0
# The features of all processes are already gathered, and only the first process computes the distance.
_ALONE = {"sync_on_compute": False}


def frechet_distance(features: Tensor, reference: Tensor) -> float:
    """Fréchet distance of two Gaussians (Heusel et al. 2017, arXiv 1706.08500), the distance of FID.

    Lower is closer. With few pictures it is biased upwards, so compare only sets of equal size. The features
    are [n, d] and [m, d] with n, m ≥ 2.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    measure = FrechetInceptionDistance(feature=_as_they_are(features), **_ALONE)
    measure.update(reference.double(), real=True)
    measure.update(features.double(), real=False)
    return float(measure.compute())


def kernel_distance(features: Tensor, reference: Tensor) -> float:
    """Squared maximum mean discrepancy with a cubic kernel (Bińkowski et al. 2018, arXiv 1801.01401): KID.

    It is unbiased, so it suits few pictures. For similar sets it may be negative. Two sets of equal size, up
    to a thousand pictures, are compared as a whole. Otherwise the result is the mean over 100 fixed subsets
    of at most a thousand.

    The features are [n, d] and [m, d] with n, m ≥ 2.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(len(features), len(reference), _LARGEST_SUBSET)
    subsets = 1 if {len(features), len(reference)} == {size} else _SUBSETS
    # torchmetrics warns that storing the features takes memory. They are in memory already.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance` will save")
        measure = KernelInceptionDistance(
            feature=_as_they_are(features), subsets=subsets, subset_size=size, **_ALONE
        )
    measure.update(reference.double(), real=True)
    measure.update(features.double(), real=False)
    with torch.random.fork_rng(devices=[]):  # torchmetrics draws the subsets from the global generator
        torch.manual_seed(_SEED)
        mean, _ = measure.compute()
    return float(mean)


def _as_they_are(features: Tensor) -> nn.Module:
    extractor = nn.Identity()
    extractor.num_features = features.shape[1]  # type: ignore[assignment]
    return extractor
