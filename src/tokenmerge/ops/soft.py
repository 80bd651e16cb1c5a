"""A soft plan: the tokens of a tile are shared out over its destinations (arXiv 2509.10918)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops.once import Device
from tokenmerge.ops.partition import num_destinations, num_tokens


class Tiles(NamedTuple):
    """A token grid cut into t tiles of up to p tokens; smaller ones are padded."""

    place: Tensor  # [n] place 0 … t·p − 1 of each token
    token: Tensor  # [t, p] index of the token at each place; 0 in padding
    real: Tensor  # [t, p] whether a place holds a token and is not padding


def tile(grid: Sequence[int], smallest: Sequence[int], device: Device = None) -> Tiles:
    """Cut a grid of (rows, columns) into as many tiles of at least ``smallest`` as fit along each axis.

    The sides of the tiles differ by at most one token.

    >>> tile((1, 5), (1, 2)).token.tolist()
    [[0, 1, 2], [3, 4, 0]]
    """
    place = torch.zeros(num_tokens(grid), dtype=torch.int64, device=device).view(tuple(grid))
    within = torch.zeros_like(place)
    p = 1
    for axis, (side, stride) in enumerate(zip(grid, smallest, strict=True)):
        count = side // stride
        longest = -(-side // count)
        at = torch.arange(side, device=device)
        part = at * count // side
        first = -(-part * side // count)
        shape = [-1 if i == axis else 1 for i in range(len(grid))]
        place = place * count + part.view(shape)
        within = within * longest + (at - first).view(shape)
        p *= longest
    place = (place * p + within).flatten()
    token = torch.full((num_destinations(grid, smallest) * p,), -1, device=device)
    token = token.scatter(0, place, torch.arange(len(place), device=device)).view(-1, p)
    return Tiles(place, token.clamp(min=0), token >= 0)


class SoftPlan(NamedTuple):
    """A plan that shares n tokens out over m = n − r merged tokens, for each of b images.

    Each of t tiles has p places for tokens and k slots for merged tokens; unused ones are padding. As in
    ``MergePlan``, indices are rows over all images.
    """

    keep: Tensor  # [b, m] row of the token whose place each merged token takes
    inverse: Tensor  # [b, n] merged row that has the largest share of each token
    sizes: Tensor  # [b, m] sum of the shares in each merged token
    shares: Tensor  # [b, t, k, p] share of each token in each slot of its tile; those of a token sum to 1
    tokens: Tensor  # [b, t * p] row of the token at each place
    places: Tensor  # [b, n] place of each token, in rows of [b * t * p]
    merged: Tensor  # [b, t * k] merged row of each slot
    slots: Tensor  # [b, m] slot of each merged token, in rows of [b * t * k]

    def labels(self) -> Tensor:
        """Return the index 0 … m−1 of the merged token with the largest share of each token: ``[b, n]``."""
        return self.inverse % self.keep.shape[1]

    def kept(self) -> Tensor:
        """Return the index 0 … n−1 of the token whose place each merged token takes: ``[b, m]``."""
        return self.keep % self.inverse.shape[1]

    def merge(self, x: Tensor) -> Tensor:
        """Return means weighted by shares, in float32, differentiable: ``[b, n, c]`` → ``[b, m, c]``."""
        total = _shared_out(x, self.tokens, self.shares, self.slots)
        return (total / self.sizes.view(-1, 1)).to(x.dtype).view(len(x), -1, x.shape[2])

    def unmerge(self, y: Tensor) -> Tensor:
        """Return means of the merged tokens by the shares of each token: ``[b, m, c]`` → ``[b, n, c]``."""
        tokens = _shared_out(y, self.merged, self.shares.transpose(2, 3), self.places)
        return tokens.to(y.dtype).view(len(y), -1, y.shape[2])

    def joined(self, parts: int) -> SoftPlan:
        """Return the plan for b / ``parts`` images, each of which joins ``parts`` images."""
        b = len(self.keep) // parts
        return SoftPlan(*[field.reshape(b, -1, *field.shape[2:]) for field in self])

    def repeated(self, times: int) -> SoftPlan:
        """Return the plan for a batch that repeats the b images of this plan ``times`` times."""
        _, t, k, p = self.shares.shape
        return _in_rows(
            self.kept().repeat(times, 1),
            self.shares.repeat(times, 1, 1, 1),
            (self.places % (t * p)).repeat(times, 1),
            (self.slots % (t * k)).repeat(times, 1),
        )

    def within(self, start: Tensor, total: int) -> SoftPlan:
        """Return the plan for sequences of ``total`` tokens: see ``MergePlan.within``."""
        _, t, k, p = self.shares.shape
        n = self.inverse.shape[1]
        start = start.unsqueeze(1)
        alone, own_places, own_slots = _alone(total - n, t, self.shares)
        others = torch.arange(total - n, device=start.device)
        behind = others >= start
        beside = others + n * behind
        places = torch.cat([own_places, self.places % (t * p)], dim=1)
        tokens = torch.cat([beside, start + torch.arange(n, device=start.device)], dim=1)
        return _in_rows(
            keep=torch.cat([beside, self.kept() + start], dim=1),
            shares=torch.cat([self.shares, alone], dim=1),
            places=torch.empty_like(places).scatter(1, tokens, places),
            slots=torch.cat([own_slots, self.slots % (t * k)], dim=1),
        )


def _shared_out(x: Tensor, given: Tensor, shares: Tensor, wanted: Tensor) -> Tensor:
    """Multiply the ``given`` rows of each tile by its shares ``[b, t, k, p]``; return the ``wanted`` rows."""
    exact = torch.promote_types(x.dtype, torch.float32)
    rows = x.flatten(0, 1).index_select(0, given.flatten()).to(exact)
    tiles = shares.flatten(0, 1).to(exact) @ rows.unflatten(0, (-1, shares.shape[3]))
    return tiles.flatten(0, 1).index_select(0, wanted.flatten())


def make_soft_plan(tiles: Tiles, chosen: Tensor, is_destination: Tensor, shares: Tensor, m: int) -> SoftPlan:
    """Make a plan that shares the tokens of each tile out over its destinations, m in all tiles together.

    ``chosen`` ``[b, t, k]`` is the place 0 … p−1 of each destination in its tile, ``is_destination``
    ``[t, k]`` which of these are no padding, and ``shares`` ``[b, t, k, p]`` the share of each token in each
    destination, 0 in padding.
    """
    b = len(chosen)
    slots = is_destination.flatten().to(torch.uint8).argsort(descending=True, stable=True)[:m].expand(b, -1)
    keep = tiles.token.expand(b, -1, -1).gather(2, chosen).flatten(1).gather(1, slots)
    return _in_rows(keep, shares, tiles.place.expand(b, -1), slots)


def join_soft(plans: Sequence[SoftPlan | None], lengths: Sequence[int]) -> SoftPlan:
    """Return the plan for runs of tokens in a row: see ``join_plans``."""
    soft = [plan for plan in plans if plan is not None]
    k = max(plan.shares.shape[2] for plan in soft)
    p = max(plan.shares.shape[3] for plan in soft)
    like = soft[0].shares.new_zeros(len(soft[0].keep), 0, k, p)
    runs: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # kept, shares, places, slots
    n = 0  # tokens of the runs so far
    t = 0  # and their tiles
    for plan, length in zip(plans, lengths, strict=True):
        if plan is None:
            shares, places, slots = _alone(length, t, like)
            kept = torch.arange(n, n + length, device=like.device).expand_as(slots)
        else:
            tiles, own_k, own_p = plan.shares.shape[1:]
            place = plan.places % (tiles * own_p)
            slot = plan.slots % (tiles * own_k)
            places = (t + place // own_p) * p + place % own_p
            slots = (t + slot // own_k) * k + slot % own_k
            kept = plan.kept() + n
            shares = F.pad(plan.shares, (0, p - own_p, 0, k - own_k))
        runs.append((kept, shares, places, slots))
        n += length
        t += shares.shape[1]
    keep, shares, places, slots = (torch.cat(values, dim=1) for values in zip(*runs, strict=True))
    return _in_rows(keep, shares, places, slots)


def _alone(n: int, t: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares, places and slots of n tokens that do not merge, k in each tile, after t other tiles.

    ``like`` are shares ``[b, …, k, p]``.
    """
    b, _, k, p = like.shape
    token = torch.arange(n, device=like.device)
    shares = torch.eye(k, p, dtype=like.dtype, device=like.device).expand(b, -(-n // k), -1, -1)
    place = (t + token // k) * p + token % k
    return shares, place.expand(b, -1), (token + t * k).expand(b, -1)


def _inverse(index: Tensor, size: int) -> Tensor:
    """Return for each of ``size`` numbers its place in ``index`` ``[b, n]``, 0 where it is not there."""
    every = torch.arange(index.shape[1], device=index.device).expand_as(index)
    return index.new_zeros(len(index), size).scatter(1, index, every)


def _in_rows(keep: Tensor, shares: Tensor, places: Tensor, slots: Tensor) -> SoftPlan:
    """Make the plan with rows over all images and all derived fields, from indices within each image."""
    b, t, k, p = shares.shape
    n = places.shape[1]
    m = slots.shape[1]
    image = torch.arange(b, device=keep.device).unsqueeze(1)
    tokens = _inverse(places, t * p)
    merged = _inverse(slots, t * k)
    largest = shares.argmax(dim=2) + torch.arange(t, device=keep.device).unsqueeze(1) * k  # [b, t, p]
    return SoftPlan(
        keep=keep + image * n,
        inverse=merged.gather(1, largest.flatten(1).gather(1, places)) + image * m,
        sizes=shares.sum(dim=3).flatten(1).gather(1, slots),
        shares=shares,
        tokens=tokens + image * n,
        places=places + image * (t * p),
        merged=merged + image * m,
        slots=slots + image * (t * k),
    )
