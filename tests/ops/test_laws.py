"""What must hold for every grid, ratio and image."""

import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tokenmerge.config import ToMeConfig
from tokenmerge.methods.tome import num_removed, plan_tome
from tokenmerge.ops import merge, strided_partition, unmerge

sizes = st.integers(1, 9)
strides = st.integers(1, 3)
seeds = st.integers(0, 2**40)


@st.composite
def cases(draw):
    sx, sy = draw(strides), draw(strides)
    height, width = draw(st.integers(sy, 9)), draw(st.integers(sx, 9))
    ratio = draw(st.floats(0, 1 - 1 / (sx * sy)))
    config = ToMeConfig(ratio=ratio, sx=sx, sy=sy, use_rand=draw(st.booleans()), seed=draw(seeds))
    x = torch.randn(
        draw(st.integers(1, 3)), height * width, 5, generator=torch.Generator().manual_seed(draw(seeds))
    )
    return config, height, width, x, torch.tensor(draw(seeds))


@given(height=sizes, width=sizes, sx=strides, sy=strides, seed=seeds, step=seeds, rand=st.booleans())
def test_the_partition_is_a_permutation_with_one_destination_in_each_cell(
    height, width, sx, sy, seed, step, rand
):
    draw = (seed, torch.tensor(step)) if rand else None
    src, dst = strided_partition(height, width, sx, sy, draw=draw)
    assert sorted([*src.tolist(), *dst.tolist()]) == list(range(height * width))
    cells = [(i // width // sy, i % width // sx) for i in dst.tolist()]
    assert cells == [(y, x) for y in range(height // sy) for x in range(width // sx)]
    if not rand:
        assert dst.tolist() == reference.destinations(height, width, sx, sy)


@given(cases())
def test_r_tokens_go_sizes_sum_to_n_and_the_weighted_sum_is_conserved(case):
    config, height, width, x, step = case
    plan = plan_tome(x, height, width, config, step)
    r = num_removed(height, width, config)
    if r == 0:
        assert plan is None
        return
    merged = merge(plan, x)
    n = height * width
    assert merged.shape == (x.shape[0], n - r, x.shape[2])
    assert plan.sizes.sum(dim=1).tolist() == [n] * x.shape[0]
    assert all(len(set(row)) == n - r for row in plan.kept().tolist())
    assert_close((merged * plan.sizes.unsqueeze(-1)).sum(dim=1), x.sum(dim=1), atol=1e-5, rtol=1e-5)


@given(cases())
def test_each_merged_token_is_the_mean_of_its_group(case):
    config, height, width, x, step = case
    plan = plan_tome(x, height, width, config, step)
    if plan is None:
        return
    merged = merge(plan, x)
    for image in range(x.shape[0]):
        labels = plan.labels()[image]
        for token in range(merged.shape[1]):
            group = labels == token
            assert group.sum() == plan.sizes[image, token]
            assert group[plan.kept()[image, token]]
            assert_close(merged[image, token], x[image, group].mean(dim=0), atol=1e-6, rtol=1e-5)


@given(cases())
def test_unmerging_is_exact_where_the_merged_tokens_were_equal(case):
    config, height, width, x, step = case
    plan = plan_tome(x, height, width, config, step)
    if plan is None:
        return
    equal_in_groups = unmerge(plan, torch.arange(plan.keep.numel()).view(*plan.keep.shape, 1).float())
    assert torch.equal(unmerge(plan, merge(plan, equal_in_groups)), equal_in_groups)


@given(cases())
def test_every_token_gets_the_result_of_its_own_group_and_of_its_own_image(case):
    config, height, width, x, step = case
    plan = plan_tome(x, height, width, config, step)
    if plan is None:
        return
    b, m = plan.keep.shape
    image_and_token = torch.cartesian_prod(torch.arange(b), torch.arange(m)).view(b, m, 2).float()
    back = unmerge(plan, image_and_token)
    assert torch.equal(back[..., 1].long(), plan.labels())
    assert torch.equal(back[..., 0].long(), torch.arange(b).unsqueeze(1).expand(b, height * width))


@settings(max_examples=40)
@given(cases())
def test_the_plan_is_that_of_the_slow_reference(case):
    config, height, width, x, _ = case
    config = ToMeConfig(ratio=config.ratio, sx=config.sx, sy=config.sy, use_rand=False)
    plan = plan_tome(x, height, width, config, torch.tensor(0))
    if plan is None:
        return
    values = torch.randn(x.shape[0], height * width, 3, generator=torch.Generator().manual_seed(1))
    back = unmerge(plan, merge(plan, values))
    dst = reference.destinations(height, width, config.sx, config.sy)
    for image in range(x.shape[0]):
        groups = reference.groups(x[image].double().tolist(), dst, num_removed(height, width, config))
        expected = reference.merge_then_unmerge(values[image].tolist(), groups)
        assert_close(back[image], torch.tensor(expected), atol=1e-6, rtol=1e-5)
