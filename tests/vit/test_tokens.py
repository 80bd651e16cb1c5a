"""Tokens that merge again and again."""

import pytest
import torch
import vits
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tokenmerge.vit.planner import RecordedTokens, most_removed, plan_by_size, plan_tome_vit


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def merge_twice(x: torch.Tensor, protected: int, seed: int = 0) -> tuple[torch.Tensor, RecordedTokens]:
    tokens = None
    for step in (0, 1):
        n = x.shape[1]
        keys = random_tokens(x.shape[0], n, 4, seed=seed + step)
        plan = plan_by_size(
            plan_tome_vit(keys, most_removed(n, protected) // 2, protected), tokens, protected
        )
        x, tokens = plan.merge(x), plan.after
    return x, tokens


@given(n=st.integers(8, 30), protected=st.integers(0, 4), seed=st.integers(0, 2**30))
def test_a_token_is_the_mean_of_all_that_ever_went_into_it(n, protected, seed):
    x = random_tokens(2, n, 3, seed=seed)
    merged, tokens = merge_twice(x, protected, seed)
    for image in range(2):
        assert torch.equal(
            tokens.source[image].bincount(minlength=merged.shape[1]).float(), tokens.sizes[image]
        )
        for token in range(merged.shape[1]):
            group = tokens.source[image] == token
            assert_close(merged[image, token], x[image, group].mean(dim=0), atol=1e-6, rtol=1e-5)
    assert torch.equal(tokens.unmerge(merged)[1], merged[1, tokens.source[1]])


@given(n=st.integers(5, 20), protected=st.integers(0, 3), seed=st.integers(0, 2**30))
def test_the_plan_is_that_of_the_slow_reference(n, protected, seed):
    keys = random_tokens(2, n, 4, seed=seed)
    for r in {1, most_removed(n, protected)}:
        plan = plan_tome_vit(keys, r, protected)
        for image in range(2):
            groups = vits.slow_groups(keys[image].double(), r, protected)
            labels = plan.labels()[image].tolist()
            assert plan.kept()[image].tolist() == [group[0] for group in groups]
            for token, group in enumerate(groups):
                assert {i for i, label in enumerate(labels) if label == token} == set(group)


def test_a_token_that_nothing_merges_into_keeps_its_value_exactly_also_when_it_is_large():
    x, keys = random_tokens(1, 12, 3), random_tokens(1, 12, 4)
    first = plan_by_size(plan_tome_vit(keys, 3, protected=0), None, 0)
    x = first.merge(x)
    second = plan_by_size(plan_tome_vit(random_tokens(1, 9, 4, seed=1), 1, protected=0), first.after, 0)
    merged = second.merge(x)
    alone = second.plan.sizes[0] == 1
    assert (second.after.sizes[0, alone] > 1).any()
    assert torch.equal(merged[0, alone], x[0, second.plan.kept()[0, alone]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_merging_only_rounds_its_result(dtype):
    """Sums are exact enough in float32, so the error is that of rounding the mean once: half an ulp."""
    x = (random_tokens(1, 64, 8) + 3).to(dtype)
    keys = random_tokens(1, 64, 4)
    sizes = torch.arange(1.0, 65.0).unsqueeze(0)
    plan = plan_by_size(
        plan_tome_vit(keys, 32, 0), RecordedTokens(torch.arange(64).unsqueeze(0), sizes, 0), 0
    )
    exact, merged = plan.merge(x.double()), plan.merge(x)
    assert merged.dtype == dtype
    assert ((merged - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()


def test_merging_and_unmerging_have_the_gradients_of_their_matrices():
    sizes = torch.arange(1.0, 13.0).expand(2, -1)
    keys = random_tokens(2, 12, 4)
    plan = plan_by_size(
        plan_tome_vit(keys, 4, 1), RecordedTokens(torch.arange(12).expand(2, -1), sizes, 1), 1
    )
    x = random_tokens(2, 12, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: plan.merge(t), x)
    assert torch.autograd.gradcheck(lambda t: plan.after.unmerge(plan.plan.unmerge(plan.merge(t))[:, :8]), x)


def test_without_sizes_it_is_the_plain_mean():
    x, keys = random_tokens(2, 12, 3), random_tokens(2, 12, 4)
    plan = plan_tome_vit(keys, 4, 1)
    assert torch.equal(plan_by_size(plan, None, 1).merge(x), plan.merge(x))
    each = RecordedTokens(torch.arange(12).expand(2, -1), torch.ones(2, 12), 1)
    assert_close(plan_by_size(plan, each, 1).merge(x), plan.merge(x))
