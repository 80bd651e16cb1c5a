"""The plans of an exported model: which ones are accepted, and that PyTorch merges by them."""

from __future__ import annotations

import math

import hosts
import pytest
import torch
from torch.nn import functional as F

from tokenmerge import ToMeConfig, token_merging
from tokenmerge.ops import bipartite_soft_matching, make_plan, strided_partition
from tokenmerge_tools.export.plans import TakenPlans, flaw_of, gap, made_plans, plan_tensors

GRID, R = (4, 6), 9


@pytest.fixture
def features():
    return torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0))


def plan_of(features, order=None, nearest=None):
    src, dst = strided_partition(GRID, (2, 2))
    own_order, own_nearest = bipartite_soft_matching(features, src, dst)
    return make_plan(
        src, dst, own_order if order is None else order, own_nearest if nearest is None else nearest, R
    )


def test_a_plan_has_no_flaw_and_no_gap_beside_itself(features):
    plan = plan_of(features)
    assert flaw_of(plan, plan) is None
    assert gap(features, plan, plan) == 0


@pytest.mark.parametrize(
    ("field", "value", "flaw"),
    [
        ("keep", -1, "out of range"),
        ("inverse", 10**6, "out of range"),
        ("sources", "keep", "missing"),
        ("targets", "other", "comes back from another"),
        ("sizes", 7, "sizes"),
    ],
)
def test_a_plan_with_one_wrong_index_is_found(features, field, value, flaw):
    own = plan_of(features)
    wrong = getattr(own, field).clone()
    if value == "keep":
        wrong[0, 0] = own.keep[0, 0]
    elif value == "other":
        wrong[0, 0] = (wrong[0, 0] + 1) % own.keep.shape[1]
    else:
        wrong[0, 0] = value
    assert flaw in flaw_of(own._replace(**{field: wrong}), own)


def test_a_plan_of_another_length_is_found(features):
    own = plan_of(features)
    src, dst = strided_partition(GRID, (2, 2))
    shorter = make_plan(src, dst, *bipartite_soft_matching(features, src, dst), R - 1)
    assert "number of tokens" in flaw_of(shorter, own)


def test_the_gap_is_what_the_best_edge_loses_to_another(features):
    """Three tokens in a plane, whose angles give the similarities."""
    angles = torch.tensor([0.0, 0.3, 1.0])  # a source between two destinations
    plane = torch.stack([angles.cos(), angles.sin()], dim=-1).unsqueeze(0)
    src, dst, order = torch.tensor([1]), torch.tensor([0, 2]), torch.tensor([[0]])
    near, far = (make_plan(src, dst, order, torch.tensor([[place]]), 1) for place in (0, 1))
    expected = torch.cos(torch.tensor(0.3)) - torch.cos(torch.tensor(0.7))
    assert gap(plane, far, near) == pytest.approx(expected.item(), abs=1e-6)
    assert gap(plane, near, far) == 0  # every other plan is at most as good as PyTorch's


def test_features_turned_by_rounding_leave_the_derived_gap(features):
    """Features that differ by d of their length give a plan whose gap is at most 4 d."""
    d = 0.05
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    moved = features + d * features.norm(dim=-1, keepdim=True) * F.normalize(noise, dim=-1)
    own, other = plan_of(features), plan_of(moved)
    assert not torch.equal(own.inverse, other.inverse)
    assert 0 < gap(features, other, own) <= 4 * d


@torch.no_grad()
def test_pytorch_merges_by_the_plans_that_it_takes():
    """With the plans of another seed, the output is that of the other seed."""
    unet, inputs = hosts.unet(), hosts.inputs()
    with token_merging(unet, ToMeConfig(ratio=0.5, seed=1)), made_plans(unet) as plans:
        other = hosts.call(unet, **inputs)
    taken = TakenPlans([plan_tensors(plan) for plan in plans], math.inf)
    with token_merging(unet, ToMeConfig(ratio=0.5, seed=0)):
        own = hosts.call(unet, **inputs)
    with token_merging(unet, ToMeConfig(ratio=0.5, seed=0)), taken.in_use_of(unet):
        found = hosts.call(unet, **inputs)
    assert taken.done == len(plans) > 0
    assert taken.other_choices > 0
    assert torch.equal(found, other)
    assert not torch.equal(found, own)
