"""Clusters of similar tokens; one token of each is computed, as in ClusCa (arXiv 2509.10312)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan, uniform_noise

OWN_NUMBER = True
# Rounds of K-means, as in the authors' code.
_ROUNDS = 10


def k_means(features: Tensor, centroids: Tensor, rounds: int = _ROUNDS) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm with Euclidean distances.

    Args:
        features: ``[b, n, c]``.
        centroids: ``[b, k, c]``, the initial ones.
        rounds: how often all tokens are assigned, ≥ 1. Means are taken between two rounds.

    Returns:
        ``[b, n]`` the cluster of each token, 0 … k−1, and ``[b, n]`` its squared distance to the centroid
        that it was assigned to. A cluster without tokens keeps its centroid.
    """
    x, centroids = features.float(), centroids.float()
    for number in range(rounds):
        # Without the square of the token, which is the same for all clusters.
        distances = centroids.square().sum(dim=2).unsqueeze(1) - 2 * x @ centroids.transpose(1, 2)
        nearest, labels = distances.min(dim=2)
        if number < rounds - 1:
            clusters = torch.arange(centroids.shape[1], device=x.device)
            members = (labels.unsqueeze(2) == clusters).to(x.dtype)  # one_hot would wait for the device
            counts = members.sum(dim=1).unsqueeze(2)
            means = members.transpose(1, 2) @ x / counts.clamp(min=1)
            centroids = torch.where(counts > 0, means, centroids)
    return labels, nearest + x.square().sum(dim=2)


def plan_clusters(
    features: Tensor, grid: Sequence[int], r: int, settings: MergeSettings, step: Tensor
) -> Plan:
    """Form ``settings.clusters`` clusters by K-means, and merge all tokens of a cluster into one of them.

    That token is drawn at random at each step. With ``settings.use_rand`` off, it is the token nearest to the
    mean of its cluster. The initial means are tokens, drawn at random or evenly spaced. If a cluster gets no
    token, another token stays in its place, so that the same number stays in every picture. Of n tokens at
    most n − 1 stay. All ratios above 0 have the same effect.

    Planning time is linear in the number of tokens times the number of clusters.
    """
    b, n, _ = features.shape
    k, device = min(settings.clusters, n - 1), features.device
    if settings.use_rand:
        luck = uniform_noise((settings.seed, step), n, device)
        first = luck.topk(k).indices
    else:
        luck = 1 - torch.arange(n, device=device) / n
        first = torch.arange(k, device=device) * n // k
    labels, distances = k_means(features, features.index_select(1, first))

    wanted = luck.expand(b, -1) if settings.use_rand else -distances
    own = labels.unsqueeze(1) == torch.arange(k, device=device).unsqueeze(1)  # [b, k, n]
    chosen = wanted.unsqueeze(1).masked_fill(~own, -torch.inf).argmax(dim=2)
    is_chosen = torch.zeros(b, n, device=device).scatter_reduce(1, chosen, own.any(dim=2).float(), "amax")
    dst = (2 * is_chosen + luck).topk(k, dim=1).indices
    is_dst = torch.zeros(b, n, dtype=torch.uint8, device=device).scatter(1, dst, 1)
    src = is_dst.argsort(dim=1, stable=True)[:, : n - k]

    place = torch.zeros(b, n, dtype=torch.int64, device=device)
    place = place.scatter(1, dst, torch.arange(k, device=device).expand(b, -1))
    nearest = place.gather(1, chosen).gather(1, labels.gather(1, src))
    order = torch.arange(n - k, device=device).expand(b, -1)
    return make_plan(src, dst, order, nearest, n - k)
