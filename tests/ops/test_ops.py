"""Properties besides the laws: randomness, precision, memory and gradients."""

from typing import Any

import pytest
import torch
from planned import plan_by
from torch.testing import assert_close

from tokenmerge.config import ToMeConfig
from tokenmerge.ops import matching
from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.matching import bipartite_soft_matching
from tokenmerge.ops.once import once
from tokenmerge.ops.partition import strided_partition

HALF = ToMeConfig(ratio=0.5)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def destinations(seed: int, step: int, height: int = 64, width: int = 64) -> torch.Tensor:
    return strided_partition((height, width), (2, 2), draw=(seed, torch.tensor(step)))[1]


def test_the_draw_depends_on_seed_and_step_and_on_nothing_else():
    before = torch.random.get_rng_state()
    drawn = destinations(seed=1, step=2)
    assert torch.equal(drawn, destinations(seed=1, step=2))
    assert not torch.equal(drawn, destinations(seed=1, step=3))
    assert not torch.equal(drawn, destinations(seed=2, step=2))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("timestep", [0, 1, 999])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
def test_the_draw_is_uniform(seed, timestep):
    """Of 64 × 64 cells, 1024 are expected to draw each of the 4 positions, with standard deviation 27.7.

    With six standard deviations, 12 cases of 4 counts fail by chance once in ten million runs.
    """
    dst = destinations(seed, timestep, 128, 128)
    position = dst // 128 % 2 * 2 + dst % 2
    counts = torch.bincount(position, minlength=4).double()
    assert (counts - 1024).abs().max() < 6 * (4096 * 0.25 * 0.75) ** 0.5


def bits(timestep: float) -> int:
    """The number of the step with this timestep."""
    return arithmetic().bits(torch.tensor(timestep)).item()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (7, 8),
        (7, 9),
        (bits(512.0), bits(256.0)),
        (bits(999.0), bits(998.0)),
        (bits(1.0), bits(0.5)),
        (bits(981.0), bits(1.0)),
    ],
)
def test_two_steps_draw_independently(one, other):
    """Of 4096 cells, 1024 are expected to be 0, 1, 2 or 3 places further on, with standard deviation 27.7."""
    places = [arithmetic().choices(4, (0, torch.tensor(step)), 4096, "cpu") for step in (one, other)]
    counts = torch.bincount((places[0] - places[1]) % 4, minlength=4)
    assert (counts - 1024).abs().max() < 6 * 27.7


def test_matching_in_slices_is_matching_at_once(monkeypatch):
    x = random_tokens(2, 64, 8)
    src, dst = strided_partition((8, 8), (2, 2))
    order, nearest = bipartite_soft_matching(x, src, dst)
    monkeypatch.setitem(matching._SIMILARITIES_AT_ONCE, "cpu", 100)
    order_in_slices, nearest_in_slices = bipartite_soft_matching(x, src, dst)
    assert torch.equal(order, order_in_slices)
    assert torch.equal(nearest, nearest_in_slices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_destination_of_zeros_attracts_nothing(dtype):
    x = random_tokens(1, 16, 4).abs().to(dtype)  # cosines above 0
    src, dst = strided_partition((4, 4), (2, 2))
    x[:, dst[3]] = 0
    _, nearest = bipartite_soft_matching(x, src, dst)
    assert not (nearest == 3).any()


def test_a_source_of_zeros_is_like_nothing_and_not_the_first_to_merge():
    x = random_tokens(1, 1, 4).expand(1, 16, 4).clone()  # all alike
    x[:, 1] = 0
    src, dst = strided_partition((4, 4), (2, 2))
    order, _ = bipartite_soft_matching(x, src, dst)
    assert src[order[0, -1]] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_merging_only_rounds_its_result(dtype):
    """Sums are exact enough in float32, so the error is that of rounding the mean once: half an ulp."""
    x = (random_tokens(1, 4096, 8) + 3).to(dtype)
    x[:, ::2] = x[:, :1]  # one large group, in which a half-precision sum would stop growing
    plan = plan_by("tome", x, (1, 64, 64), ToMeConfig(ratio=0.75, seed=None), torch.tensor(0))
    exact = plan.merge(x.double())
    error = (plan.merge(x).double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()
    assert plan.merge(x).dtype == dtype


def test_merging_and_unmerging_have_the_gradients_of_their_matrices():
    x = random_tokens(2, 16, 3).double().requires_grad_()
    plan = plan_by("tome", x, (1, 4, 4), HALF, torch.tensor(0))
    assert torch.autograd.gradcheck(lambda t: plan.merge(t), x)
    assert torch.autograd.gradcheck(lambda t: plan.unmerge(plan.merge(t)), x)


def test_merge_leaves_its_input_alone():
    x = random_tokens(2, 16, 3)
    before = x.clone()
    plan_by("tome", x, (1, 4, 4), HALF, torch.tensor(0)).merge(x)
    assert torch.equal(x, before)


def test_tokens_that_are_a_view_with_strides():
    x = random_tokens(2, 3, 16).transpose(1, 2)
    plan = plan_by("tome", x, (1, 4, 4), HALF, torch.tensor(0))
    assert_close(plan.merge(x), plan.merge(x.contiguous()), rtol=0, atol=0)


def test_what_was_made_for_a_tensor_goes_silently_when_python_ends(monkeypatch):
    """The names of a module are gone by then, and the last tensors may not be."""
    tensor = torch.ones(1)
    once(tensor, "key", int)
    failures: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", failures.append)
    monkeypatch.setattr("tokenmerge.ops.once._made", None)
    del tensor
    assert not failures
