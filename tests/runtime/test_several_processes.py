"""Models that diffusers splits between devices: merging in each part, as two processes on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.test_every_family import call, model_of, settings
from tests.models.tiny import FAMILIES
from tests.runtime.several_processes import (
    CASES,
    FLUX,
    PROCESSES,
    REPORTED,
    in_one_process,
    model_of_case,
    report,
)
from torch import nn
from torch.testing import assert_close

from tokenmerge import UnsupportedModelError, apply_token_merging
from tokenmerge.models.placement import Shard, shard_of
from tokenmerge.runtime.patching import call_checks

ROOT = Path(__file__).parents[2]
SECONDS = 300  # of which most go to importing


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process leaves of all cases."""
    folder = tmp_path_factory.mktemp("several")
    module = "tests.runtime.several_processes"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * PROCESSES, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.refused])
def test_several_processes_compute_what_one_does_where_plans_are_equal(name, results):
    """All that differs is the order of sums, 1e-5 of the largest value, which a few steps add up."""
    case = CASES[name]
    expected = in_one_process(case)
    for result in results:
        assert torch.is_tensor(result[name]), result[name]
        steps = max(1, case.steps)
        assert_close(
            result[name], expected, rtol=steps * 1e-5, atol=steps * 1e-5 * expected.abs().max().item()
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
def test_what_does_not_fit_is_refused_in_every_process(name, results):
    for result in results:
        assert "UnsupportedModelError" in result[name]
        assert CASES[name].refused in result[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTED)
def test_a_report_is_that_of_the_whole_model_and_one_process_can_ask_for_it_alone(name, results):
    assert results[0]["reports"][name] == report(CASES[name], model_of_case(CASES[name]))


def refused(monkeypatch: pytest.MonkeyPatch, parts: int, size: tuple[int, int], **changes: Any) -> str:
    """What a call is refused with where each of several devices has a part of the tokens."""
    family = FAMILIES[FLUX]
    model = model_of(family)
    patch = apply_token_merging(model, settings(family, **changes))
    patch.at_step(0, 4)
    monkeypatch.setattr(call_checks, "shard_of", lambda root: Shard(0, parts, None))
    with pytest.raises(UnsupportedModelError) as caught:
        call(model, family.inputs(1, *size))
    return str(caught.value)


def test_parts_without_a_whole_cell_are_refused(monkeypatch):
    message = refused(monkeypatch, 8, (8, 8))
    assert "splits 1 × 8 × 8 tokens into 8 parts, and nothing can merge in one of them" in message


def test_planners_that_do_not_remove_what_is_asked_need_equal_parts(monkeypatch):
    """Two rows and a half: one part has its half before them, the other behind them, and the third in two."""
    message = refused(monkeypatch, 3, (10, 6), planner="uniform")
    assert "into 3 parts with different grids, and planner='uniform'" in message


def test_a_model_without_a_plan_for_its_tokens_is_refused():
    class Other(nn.Module):
        _parallel_config = SimpleNamespace(context_parallel_config=object())

    with pytest.raises(
        UnsupportedModelError, match="Other under context parallelism: its class has no _cp_plan"
    ):
        shard_of(Other())
