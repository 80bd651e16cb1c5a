"""What must hold for every grid, ratio and image."""

import dataclasses
import itertools
import math

import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_by
from torch.testing import assert_close

from tokenmerge.config import ToMeConfig, highest_ratio
from tokenmerge.ops.matching import guided_features, shared_features
from tokenmerge.ops.partition import strided_partition
from tokenmerge.ops.plan import keep_destinations
from tokenmerge.planners.sequences import num_removed

sizes = st.integers(1, 9)
strides = st.integers(1, 3)
seeds = st.integers(0, 2**40)


@st.composite
def cases(draw):
    sx, sy, time = draw(strides), draw(strides), draw(st.integers(1, 2))
    grid = draw(st.integers(time, 3)), draw(st.integers(sy, 9)), draw(st.integers(sx, 9))
    ratio = draw(st.floats(0, 1 - 1 / (sx * sy * time)))
    config = ToMeConfig(ratio=ratio, sx=sx, sy=sy, st=time, seed=draw(st.none() | seeds))
    generator = torch.Generator().manual_seed(draw(seeds))
    x = torch.randn(draw(st.integers(1, 3)), math.prod(grid), 5, generator=generator)
    return config, grid, x, torch.tensor(draw(seeds))


@given(height=sizes, width=sizes, sx=strides, sy=strides, seed=seeds, step=seeds, rand=st.booleans())
def test_the_partition_is_a_permutation_with_one_destination_in_each_cell(
    height, width, sx, sy, seed, step, rand
):
    draw = (seed, torch.tensor(step)) if rand else None
    src, dst = strided_partition((height, width), (sy, sx), draw=draw)
    assert sorted([*src.tolist(), *dst.tolist()]) == list(range(height * width))
    cells = [(i // width // sy, i % width // sx) for i in dst.tolist()]
    assert cells == [(y, x) for y in range(height // sy) for x in range(width // sx)]
    if not rand:
        assert dst.tolist() == reference.destinations(height, width, sx, sy)


@given(grid=st.tuples(sizes, sizes, sizes), cell=st.tuples(strides, strides, strides), seed=seeds)
def test_cells_may_reach_over_frames(grid, cell, seed):
    src, dst = strided_partition(grid, cell, draw=(seed, torch.tensor(0)))
    assert sorted([*src.tolist(), *dst.tolist()]) == list(range(math.prod(grid)))
    places = torch.stack(torch.unravel_index(dst, grid), dim=1) // torch.tensor(cell)
    counts = [range(side // stride) for side, stride in zip(grid, cell, strict=True)]
    assert [tuple(place) for place in places.tolist()] == list(itertools.product(*counts))


@given(cases())
def test_without_cells_over_time_each_frame_merges_within_itself(case):
    config, grid, x, step = case
    config = dataclasses.replace(config, st=1, ratio=config.ratio * highest_ratio(config.sx, config.sy))
    plan = plan_by("tome", x, grid, config, step)
    if plan is None:
        return
    frame = torch.arange(grid[0]).repeat_interleave(grid[1] * grid[2]).expand(x.shape[0], -1)
    assert torch.equal(frame.gather(1, plan.kept()).gather(1, plan.labels()), frame)


@given(cases(), st.integers(2, 3))
def test_a_repeated_plan_merges_each_repetition_alike(case, times):
    config, grid, x, step = case
    plan = plan_by("tome", x, grid, config, step)
    if plan is None:
        return
    again = plan.repeated(times)
    assert_close(again.merge(x.repeat(times, 1, 1)), plan.merge(x).repeat(times, 1, 1), rtol=0, atol=0)
    values = torch.randn(times * x.shape[0], *x.shape[1:])
    whole = again.unmerge(again.merge(values))
    parts = [plan.unmerge(plan.merge(part)) for part in values.split(x.shape[0])]
    assert_close(whole, torch.cat(parts), rtol=0, atol=0)


@given(cases(), st.integers(0, 5), seeds)
def test_a_plan_within_a_sequence_merges_its_tokens_and_leaves_the_others(case, beside, seed):
    config, grid, x, step = case
    plan = plan_by("tome", x, grid, config, step)
    if plan is None:
        return
    b, n, c = x.shape
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(beside + 1, (b,), generator=generator)
    others = torch.randn(b, beside, c, generator=generator)

    def sequence(inside):
        return torch.stack(
            [
                torch.cat([other[:at], row, other[at:]])
                for other, row, at in zip(others, inside, start.tolist(), strict=True)
            ]
        )

    within = plan.within(start, beside + n)
    whole = sequence(x)
    merged = within.merge(whole)
    assert_close(merged[:, :beside], others, rtol=0, atol=0)
    assert_close(merged[:, beside:], plan.merge(x), rtol=0, atol=0)
    assert_close(within.unmerge(merged), sequence(plan.unmerge(plan.merge(x))), rtol=0, atol=0)
    assert torch.equal(within.kept()[:, beside:], plan.kept() + start[:, None])


@given(st.integers(1, 3), st.integers(1, 3), seeds)
def test_shared_features_compare_by_the_mean_cosine(parts, b, seed):
    x = torch.randn(parts * b, 6, 5, generator=torch.Generator().manual_seed(seed))
    unit = torch.nn.functional.normalize(x, dim=-1)
    mean = (unit @ unit.transpose(1, 2)).view(parts, b, 6, 6).mean(0)
    shared = torch.nn.functional.normalize(shared_features(x, parts), dim=-1)
    assert_close(shared @ shared.transpose(1, 2), mean, rtol=1e-5, atol=1e-6)


@given(st.integers(2, 3), st.integers(1, 3), st.floats(1.0, 30.0, exclude_min=True), seeds)
def test_guided_features_have_the_direction_of_what_guidance_makes(parts, b, scale, seed):
    x = torch.randn(parts * b, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unguided, guided = x.chunk(parts)[:2]
    found = guided_features(x, parts, scale)
    assert_close(scale * found, unguided + scale * (guided - unguided), rtol=1e-9, atol=1e-9)
    assert found.abs().max() <= 2 * x.abs().max()


@given(cases())
def test_r_tokens_go_sizes_sum_to_n_and_the_weighted_sum_is_conserved(case):
    config, grid, x, step = case
    plan = plan_by("tome", x, grid, config, step)
    r = num_removed(grid, config)
    if r == 0:
        assert plan is None
        return
    merged = plan.merge(x)
    n = math.prod(grid)
    assert merged.shape == (x.shape[0], n - r, x.shape[2])
    assert plan.sizes.sum(dim=1).tolist() == [n] * x.shape[0]
    assert all(len(set(row)) == n - r for row in plan.kept().tolist())
    assert_close((merged * plan.sizes.unsqueeze(-1)).sum(dim=1), x.sum(dim=1), atol=1e-5, rtol=1e-5)


@given(cases())
def test_each_merged_token_is_the_mean_of_its_group(case):
    config, grid, x, step = case
    plan = plan_by("tome", x, grid, config, step)
    if plan is None:
        return
    merged = plan.merge(x)
    for image in range(x.shape[0]):
        labels = plan.labels()[image]
        for token in range(merged.shape[1]):
            group = labels == token
            assert group.sum() == plan.sizes[image, token]
            assert group[plan.kept()[image, token]]
            assert_close(merged[image, token], x[image, group].mean(dim=0), atol=1e-6, rtol=1e-5)


@given(cases())
def test_destinations_are_kept_as_they_are(case):
    config, grid, x, step = case
    plan = plan_by("tome", x, grid, config, step)
    if plan is None:
        return
    assert torch.equal(keep_destinations(plan, x), x.take_along_dim(plan.kept().unsqueeze(-1), dim=1))


@given(cases())
def test_unmerging_is_exact_where_the_merged_tokens_were_equal(case):
    config, grid, x, step = case
    plan = plan_by("tome", x, grid, config, step)
    if plan is None:
        return
    equal_in_groups = plan.unmerge(torch.arange(plan.keep.numel()).view(*plan.keep.shape, 1).float())
    assert torch.equal(plan.unmerge(plan.merge(equal_in_groups)), equal_in_groups)


@given(cases())
def test_every_token_gets_the_result_of_its_own_group_and_of_its_own_image(case):
    config, grid, x, step = case
    plan = plan_by("tome", x, grid, config, step)
    if plan is None:
        return
    b, m = plan.keep.shape
    image_and_token = torch.cartesian_prod(torch.arange(b), torch.arange(m)).view(b, m, 2).float()
    back = plan.unmerge(image_and_token)
    assert torch.equal(back[..., 1].long(), plan.labels())
    assert torch.equal(back[..., 0].long(), torch.arange(b).unsqueeze(1).expand(b, math.prod(grid)))


@settings(max_examples=40)
@given(cases())
def test_the_plan_is_that_of_the_slow_reference(case):
    config, grid, x, _ = case
    _, height, width = grid
    x = x[:, : height * width]  # one frame
    ratio = config.ratio * highest_ratio(config.sx, config.sy)
    config = ToMeConfig(ratio=ratio, sx=config.sx, sy=config.sy, seed=None)
    plan = plan_by("tome", x, (1, height, width), config, torch.tensor(0))
    if plan is None:
        return
    values = torch.randn(x.shape[0], height * width, 3, generator=torch.Generator().manual_seed(1))
    back = plan.unmerge(plan.merge(values))
    dst = reference.destinations(height, width, config.sx, config.sy)
    for image in range(x.shape[0]):
        groups = reference.groups(x[image].double().tolist(), dst, num_removed((1, height, width), config))
        expected = reference.merge_then_unmerge(values[image].tolist(), groups)
        assert_close(back[image], torch.tensor(expected), atol=1e-6, rtol=1e-5)
