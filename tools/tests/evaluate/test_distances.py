from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from tokenmerge_tools.evaluate.networks import frechet_distance, kernel_distance


def sets(n: int, m: int, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(d, d, generator=generator)
    return torch.randn(n, d, generator=generator) @ mix, torch.randn(m, d, generator=generator) + 0.5


def test_the_frechet_distance_is_its_formula() -> None:
    one, two = (features.double().numpy() for features in sets(40, 50))
    covariances = [np.cov(features, rowvar=False) for features in (one, two)]
    root = sqrtm(covariances[0] @ covariances[1]).real
    apart = one.mean(axis=0) - two.mean(axis=0)
    expected = apart @ apart + np.trace(covariances[0] + covariances[1] - 2 * root)
    # Both take the square root of eigenvalues in double precision.
    assert frechet_distance(*sets(40, 50)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [2, 30])
def test_the_kernel_distance_of_equally_many_is_its_formula_over_all(count: int) -> None:
    one, two = (features.double().numpy() for features in sets(count, count))

    def kernel(a, b):
        return (a @ b.T / a.shape[1] + 1) ** 3

    def mean_without_diagonal(k):
        return (k.sum() - np.trace(k)) / (count * (count - 1))

    expected = (
        mean_without_diagonal(kernel(one, one))
        + mean_without_diagonal(kernel(two, two))
        - 2 * kernel(one, two).mean()
    )
    assert kernel_distance(*sets(count, count)) == pytest.approx(expected, rel=1e-9)


def test_the_kernel_distance_of_subsets_is_always_the_same_and_leaves_the_generator_alone() -> None:
    one, two = sets(20, 33)
    state = torch.random.get_rng_state()
    first = kernel_distance(one, two)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(7)
    assert kernel_distance(one, two) == first


def test_equal_sets_are_no_distance_apart() -> None:
    one, two = sets(40, 40)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(one, two) > 1
    assert kernel_distance(one, one) < 0 < kernel_distance(one, two)
