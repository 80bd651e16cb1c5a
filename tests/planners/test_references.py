"""Every planner against its paper's formulas, written as loops over tokens, for one image and one frame."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from planned import plan_by
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from tokenmerge.config import ToMeConfig, highest_ratio
from tokenmerge.ops.partition import strided_partition
from tokenmerge.ops.plan import Plan
from tokenmerge.planners.sequences import num_removed
from tokenmerge.planners.sito import similarity_scores
from tokenmerge.planners.toma import facility_location
from tokenmerge.planners.windows import uniformity

STEP = torch.tensor(5)


@st.composite
def cases(draw):
    """A grid, the settings for it, and the double-precision tokens of one image."""
    sx, sy = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, columns = draw(st.integers(sy, 8)), draw(st.integers(sx, 8))
    ratio = draw(st.floats(0, 1)) * highest_ratio(sx, sy)
    seed = draw(st.integers(0, 2**40))
    x = torch.randn(rows * columns, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (rows, columns), {"ratio": ratio, "sx": sx, "sy": sy, "seed": seed}, x


def cosines(x: Tensor) -> list[list[float]]:
    unit = F.normalize(x.double(), dim=-1)
    return (unit @ unit.t()).tolist()


def cells(grid, config: ToMeConfig) -> list[list[int]]:
    """The tokens of each whole cell."""
    (rows, columns), sy, sx = grid, config.sy, config.sx
    return [
        [(y + i) * columns + x + j for i in range(sy) for j in range(sx)]
        for y in range(0, rows - rows % sy, sy)
        for x in range(0, columns - columns % sx, sx)
    ]


def groups(plan: Plan) -> dict[int, set[int]]:
    """For each token whose place a merged token takes, the tokens that merge into it."""
    kept, labels = plan.kept()[0].tolist(), plan.labels()[0].tolist()
    return {token: {i for i, label in enumerate(labels) if label == at} for at, token in enumerate(kept)}


def nearest(s: list[list[float]], i: int, of: list[int]) -> int:
    return max(of, key=lambda j: s[i][j])


@given(cases())
def test_similarity_scores_are_the_row_sums_of_all_cosines(case):
    _, _, x = case
    scores = similarity_scores(x.unsqueeze(0))[0]
    assert_close(scores, torch.tensor(cosines(x), dtype=torch.float64).sum(dim=1), rtol=0, atol=1e-12)


@given(cases())
def test_sito_prunes_what_is_most_similar_to_a_base_token(case):
    grid, changes, x = case
    assume(len(x) > 2)  # two tokens are equally typical
    config = ToMeConfig(**{**changes, "seed": None})
    plan = plan_by("sito", x.unsqueeze(0), (1, *grid), config, STEP)
    r = num_removed((1, *grid), config)
    if r == 0:
        assert plan is None
        return
    s = cosines(x)
    base = [max(cell, key=lambda i: sum(s[i])) for cell in cells(grid, config)]
    others = [i for i in range(len(x)) if i not in base]
    pruned = sorted(others, key=lambda i: s[i][nearest(s, i, base)], reverse=True)[:r]
    stay = [i for i in range(len(x)) if i not in pruned]
    expected = {i: {i} for i in stay}
    for i in pruned:
        expected[nearest(s, i, stay)].add(i)
    assert groups(plan) == expected


def test_the_noise_of_sito_decides_between_tokens_that_are_about_as_typical():
    """16 × 16 cells of tokens that differ by 1e-4: each position wins a quarter, within six sigma."""
    x = 1 + 1e-4 * torch.randn(1, 1024, 5, generator=torch.Generator().manual_seed(0))
    plan = plan_by("sito", x, (1, 32, 32), ToMeConfig(ratio=0.75), STEP)
    kept = plan.kept()[0]
    counts = torch.bincount(kept // 32 % 2 * 2 + kept % 2, minlength=4)
    assert (counts - 64).abs().max() < 6 * (256 * 0.25 * 0.75) ** 0.5


@given(cases())
def test_uniformity_is_the_mean_cosine_of_the_pairs(case):
    grid, changes, x = case
    windows = [cell for cell in cells(grid, ToMeConfig(**changes)) if len(cell) > 1]
    if not windows:
        return
    s = cosines(x)
    expected = []
    for window in windows:
        pairs = list(itertools.combinations(window, 2))
        expected.append(sum(s[i][j] for i, j in pairs) / len(pairs))
    found = uniformity(x.unsqueeze(0), torch.tensor(windows).t())[0]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@given(cases(), st.booleans())
def test_the_most_uniform_windows_merge_and_no_other_token_does(case, use_rand):
    grid, changes, x = case
    config = ToMeConfig(**{**changes, "seed": changes["seed"] if use_rand else None})
    plan = plan_by("windows", x.unsqueeze(0), (1, *grid), config, STEP)
    r = num_removed((1, *grid), config)
    if r == 0:
        assert plan is None
        return
    s, windows = cosines(x), cells(grid, config)
    windows.sort(key=lambda w: sum(s[i][j] for i, j in itertools.combinations(w, 2)), reverse=True)
    merged = windows[: max(1, r // (len(windows[0]) - 1))]
    alone = [{i} for i in range(len(x)) if not any(i in window for window in merged)]
    assert sorted(map(sorted, groups(plan).values())) == sorted(map(sorted, [*merged, *alone]))


@given(cases(), st.floats(-1, 1))
def test_below_the_threshold_tokens_go_and_do_not_count(case, threshold):
    grid, changes, x = case
    config = ToMeConfig(**{**changes, "seed": None}, threshold=threshold)
    plan = plan_by("threshold", x.unsqueeze(0), (1, *grid), config, STEP)
    r = num_removed((1, *grid), config)
    if r == 0:
        assert plan is None
        return
    s, dst = cosines(x), [cell[0] for cell in cells(grid, config)]
    edges = [(s[i][nearest(s, i, dst)], i, nearest(s, i, dst)) for i in range(len(x)) if i not in dst]
    edges.sort(reverse=True)
    expected, means = {i: {i} for i in range(len(x))}, {i: [i] for i in range(len(x))}
    for similarity, source, destination in edges[:r]:
        del expected[source], means[source]
        expected[destination].add(source)
        if similarity >= threshold:
            means[destination].append(source)
    assert groups(plan) == expected
    for at, token in enumerate(plan.kept()[0].tolist()):
        assert plan.sizes[0, at] == len(means[token])
        assert_close(plan.merge(x.unsqueeze(0))[0, at], x[means[token]].mean(dim=0))


@given(cases())
def test_important_tokens_are_destinations_and_the_others_merge_first(case):
    grid, changes, x = case
    config = ToMeConfig(**{**changes, "seed": None})
    importance = x[:, 0].exp()
    plan = plan_by("importance", x.unsqueeze(0), (1, *grid), config, STEP, importance.unsqueeze(0))
    n, r = len(x), num_removed((1, *grid), config)
    if r == 0:
        assert plan is None
        return
    s, count = cosines(x), len(cells(grid, config))
    by_importance = importance.argsort(descending=True).tolist()
    dst, pool = by_importance[:count], by_importance[: max(count, int(1.4 * (n - r)))]
    sources = [i for i in range(n) if i not in dst]
    sources.sort(key=lambda i: (i not in pool, s[i][nearest(s, i, dst)]), reverse=True)
    expected = {i: {i} for i in range(n) if i not in sources[:r]}
    for i in sources[:r]:
        expected[nearest(s, i, dst)].add(i)
    assert groups(plan) == expected


def test_destinations_are_drawn_from_all_of_the_pool():
    """128 of the 358 most important tokens: their mean rank is that of a random draw, within six sigma."""
    n, d, pool = 512, 128, 358
    importance = torch.arange(float(n)).flip(0).unsqueeze(0)
    x = torch.randn(1, n, 5, generator=torch.Generator().manual_seed(0))
    plan = plan_by("importance", x, (1, 16, 32), ToMeConfig(ratio=0.5), STEP, importance)
    drawn = plan.kept()[0, -d:].double()
    assert drawn.max() < pool
    sigma = math.sqrt((pool**2 - 1) / 12 / d * (1 - d / pool))
    assert abs(drawn.mean() - (pool - 1) / 2) < 6 * sigma


def check_greedy(s: list[list[float]], tokens: list[int], chosen: list[int], places: int) -> None:
    """Check that no other token would make Σ_i max_j S_ij larger than each choice does.

    Two that differ by less than 1e-5 for each place of a tile count as equal, and the first is chosen.
    """
    assert len(set(chosen)) == len(chosen)
    for k, choice in enumerate(chosen):
        reached = {
            j: sum(max(s[i][d] for d in [*chosen[:k], j]) for i in tokens)
            for j in tokens
            if j not in chosen[:k]
        }
        assert reached[choice] >= max(reached.values()) - 1e-5 * places - 1e-12


@given(cases(), st.integers(1, 8))
def test_facility_location_is_the_greedy_one(case, count):
    _, _, x = case
    s, count = cosines(x), min(count, len(x))
    everywhere = torch.ones(1, len(x), dtype=torch.bool)
    found = facility_location(torch.tensor(s, dtype=torch.float64).unsqueeze(0), everywhere, count)
    assert found.shape == (1, count)
    check_greedy(s, list(range(len(x))), found[0].tolist(), len(x))


def test_facility_location_chooses_none_twice_where_all_are_alike():
    real = torch.tensor([[True, True, True, False]])
    found = facility_location(torch.ones(1, 4, 4) * real.unsqueeze(1) * real.unsqueeze(2), real, 3)
    assert sorted(found[0].tolist()) == [0, 1, 2]


@given(cases())
def test_toma_shares_the_tokens_of_each_tile_out(case):
    (rows, columns), changes, x = case
    config = ToMeConfig(**changes)
    plan = plan_by("toma", x.unsqueeze(0), (1, rows, columns), config, STEP)
    n, r = len(x), num_removed((1, rows, columns), config)
    if r == 0:
        assert plan is None
        return
    s = cosines(x)
    down, across = rows // config.sy, columns // config.sx
    kept, before = plan.kept()[0].tolist(), 0
    means, back, sizes = {}, torch.zeros(n, n, dtype=torch.float64), {}
    for ty, tx in itertools.product(range(down), range(across)):
        ys = [y for y in range(rows) if y * down // rows == ty]
        xs = [z for z in range(columns) if z * across // columns == tx]
        tokens = [y * columns + z for y in ys for z in xs]
        assert len(ys) >= config.sy
        assert len(xs) >= config.sx
        fewer = r * (before + len(tokens)) // n - r * before // n
        before += len(tokens)
        chosen = [token for token in kept if token in tokens]
        assert len(chosen) == len(tokens) - fewer
        check_greedy(s, tokens, chosen, plan.shares.shape[3])
        logits = [[1000 * s[d][i] for i in tokens] for d in chosen]
        shares = torch.tensor(logits, dtype=torch.float64).softmax(dim=0)
        for d, row in zip(chosen, shares, strict=True):
            means[d], sizes[d] = (row @ x[tokens]) / row.sum(), row.sum().item()
            back[tokens, d] = row
    merged = plan.merge(x.unsqueeze(0))
    for at, token in enumerate(kept):
        assert_close(merged[0, at], means[token])
        assert_close(plan.sizes[0, at].item(), sizes[token])
    y = torch.randn(1, n - r, 3, dtype=torch.float64)
    assert_close(plan.unmerge(y)[0], back[:, kept] @ y[0])
    assert torch.equal(plan.labels()[0], back[:, kept].argmax(dim=1))


def test_without_noise_the_destinations_of_windows_are_the_first_of_each():
    x = torch.randn(1, 24, 5, generator=torch.Generator().manual_seed(0))
    plan = plan_by("windows", x, (1, 4, 6), ToMeConfig(ratio=0.75, seed=None), STEP)
    _, dst = strided_partition((4, 6), (2, 2))
    assert plan.kept()[0].tolist() == dst.tolist()
