"""What scripts import from ``tomesd.merge``: the same results for the same generator."""

import inspect

import pytest
import tomesd
import torch
from torch import Tensor

from tokenmerge import ConfigError, merge

SIZES = [(16, 16, 2, 2, 128), (13, 17, 2, 3, 60), (8, 12, 4, 4, 10_000), (5, 5, 2, 2, 1)]


def metric(w: int, h: int) -> Tensor:
    return torch.randn(3, w * h, 8, generator=torch.Generator().manual_seed(w))


def rows(x: Tensor) -> list[list[tuple[float, ...]]]:
    """The tokens of each image, sorted and rounded to five digits, since sums may have another order."""
    return [sorted(tuple(round(v, 5) for v in token.tolist()) for token in image) for image in x]


@pytest.mark.parametrize("name", merge.__all__)
def test_the_signatures_are_those_of_tomesd(name):
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (merge, tomesd.merge))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(("w", "h", "sx", "sy", "r"), SIZES)
def test_merging_and_unmerging_is_that_of_tomesd(w, h, sx, sy, r, random):
    x, values = metric(w, h), torch.rand(3, w * h, 5)
    ours, theirs = (
        module.bipartite_soft_matching_random2d(
            x, w, h, sx, sy, r, no_rand=not random, generator=torch.Generator().manual_seed(7)
        )
        for module in (merge, tomesd.merge)
    )
    (our_merge, our_unmerge), (their_merge, their_unmerge) = ours, theirs
    assert our_merge(values, mode="mean").shape == their_merge(values).shape
    assert rows(our_merge(values)) == rows(their_merge(values))
    # A mean of a few hundred numbers below 1, summed in another order.
    torch.testing.assert_close(
        our_unmerge(our_merge(values)), their_unmerge(their_merge(values)), atol=1e-5, rtol=0
    )


def test_nothing_to_remove_leaves_the_tokens_as_they_are():
    x = metric(4, 4)
    assert merge.bipartite_soft_matching_random2d(x, 4, 4, 2, 2, 0) == (merge.do_nothing, merge.do_nothing)
    assert merge.do_nothing(x, mode="mean") is x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"w": 5}, "metric: expected w · h = 20 tokens, got 16; "),
        ({"no_rand": False}, r"generator: expected a torch\.Generator, got None; "),
    ],
)
def test_errors_say_what_is_wrong(arguments, message):
    valid = {"w": 4, "h": 4, "sx": 2, "sy": 2, "r": 4, "no_rand": True}
    with pytest.raises(ConfigError, match=message):
        merge.bipartite_soft_matching_random2d(metric(4, 4), **{**valid, **arguments})


def test_other_ways_of_merging_are_refused():
    x = metric(4, 4)
    combine, _ = merge.bipartite_soft_matching_random2d(x, 4, 4, 2, 2, 4, no_rand=True)
    with pytest.raises(ConfigError, match="mode: expected 'mean', got 'sum'"):
        combine(x, mode="sum")
