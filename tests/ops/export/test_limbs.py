"""Draws in limbs of few bits, for programs that run exported models with int32 only."""

from __future__ import annotations

import pytest
import torch

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.exported_arithmetic import hash_in_limbs
from tokenmerge.ops.partition import uniform_noise
from tokenmerge.ops.pytorch_arithmetic import hash_of

STEPS = (0, 1, 981, 0x447A0000, 2**31 - 1, -1, -(2**31))


@pytest.mark.parametrize("seed", [0, 7, -3, 2**31 + 5, 2**40 + 7])
@pytest.mark.parametrize("step", STEPS)
def test_limbs_are_the_bits_of_the_hash(seed, step):
    """Exactly, since an exported program must draw the same places as PyTorch."""
    place = torch.arange(4096)
    low, middle, high = hash_in_limbs(seed, torch.tensor(step), place)
    assert torch.equal(low + (middle << 11) + (high << 22), hash_of(seed, torch.tensor(step), place))


def test_limbs_and_all_that_leads_to_them_fit_in_24_bits(monkeypatch):
    """int32 holds 31 bits, and programs that compute integers in float32 are exact up to 2**24."""
    largest = 0

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.dtype == torch.int64:
                largest = max(largest, int(found.abs().max()))
            return found

    place = torch.arange(4096)
    step = torch.tensor(2**24 - 1)
    with Watching():
        hash_in_limbs(2**32 - 1, step, place)
    assert largest < 2**24


class Draws(torch.nn.Module):
    def forward(self, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        draw, ours = (3, step), arithmetic()
        below_4, below_6 = (ours.choices(size, draw, 600, None) for size in (4, 6))
        return below_4, below_6, uniform_noise(draw, 600)


def test_an_exported_program_draws_what_pytorch_draws():
    program = torch.export.export(Draws(), (torch.tensor(0),), strict=False).module()
    for step in STEPS:
        for found, expected in zip(program(torch.tensor(step)), Draws()(torch.tensor(step)), strict=True):
            assert torch.equal(found, expected)
