from __future__ import annotations

import sys
import time

import pytest
import torch

from tokenmerge_tools.timing import interleaved, peak_memory, peak_memory_meaning, reset_peak_memory

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory of a CPU run is read on Linux")


def test_variants_take_turns_and_each_call_is_timed():
    calls = []
    variants = {
        "slow": lambda: (calls.append("slow"), time.sleep(0.05)),
        "fast": lambda: calls.append("fast"),
    }
    found = list(interleaved(variants, repeat=2, device=CPU))
    assert calls == ["slow", "fast", "slow", "fast"]
    assert [measurement.variant for measurement in found] == calls
    for measurement in found:
        assert (measurement.seconds >= 0.05) == (measurement.variant == "slow")


def test_a_measurement_is_yielded_before_the_next_call():
    calls = []
    measurements = interleaved({"one": lambda: calls.append(1)}, repeat=2, device=CPU)
    next(measurements)
    assert calls == [1]


@linux
def test_peak_memory_sees_a_tensor_that_is_gone_again_and_forgets_it():
    assert reset_peak_memory(CPU)
    before = peak_memory(CPU)
    torch.ones(2**26)  # 256 MiB
    assert peak_memory(CPU) - before >= 250 * 2**20
    assert reset_peak_memory(CPU)
    assert peak_memory(CPU) - before < 100 * 2**20


@linux
def test_each_measurement_has_its_own_peak():
    variants = {"large": lambda: torch.ones(2**26), "small": lambda: None}
    large, small = interleaved(variants, repeat=1, device=CPU)
    assert large.peak_bytes - small.peak_bytes >= 200 * 2**20


def test_memory_that_cannot_be_read_is_said():
    device = torch.device("meta")
    assert not reset_peak_memory(device)
    assert "not available" in peak_memory_meaning(device)
