"""Several processes, as ``accelerate launch`` starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions, plan_evaluation
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.processes import Processes, processes
from tokenmerge_tools.evaluate.runner import _Evaluating
from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.records.kinds import QualityRecord

CPU = torch.device("cpu")


def test_every_piece_of_work_is_in_one_share() -> None:
    work = list(range(7))
    shares = [Processes(index, 3, CPU).share(work) for index in range(3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]


def test_pictures_have_the_same_neighbours_however_many_processes_there_are(
    options: Callable[..., EvaluateOptions],
) -> None:
    made = options(seeds=3)
    evaluation = plan_evaluation(made, CPU)

    def batches(count: int) -> list[list]:
        runs = [_Evaluating(made, evaluation, Processes(i, count, CPU), print) for i in range(count)]
        return sorted([list(batch) for run in runs for batch in run.batches], key=lambda batch: batch[0][0])

    assert [len(batch) for batch in batches(1)] == [2, 2, 2, 2, 1]
    assert batches(2) == batches(3) == batches(1)


def test_only_the_first_process_tells_its_progress(
    run: Callable[..., list[QualityRecord]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Second(Processes):
        def gather(self, mine: object) -> list:
            return [mine]

    team = contextlib.nullcontext(Second(1, 2, CPU))
    monkeypatch.setattr("tokenmerge_tools.evaluate.runner.processes", lambda device: team)
    drawn: list[int] = []
    assert run(drawn=drawn) is None
    assert drawn == []
    assert len(list(tmp_path.rglob("*.png"))) == 2  # its share: the last batch, dense and merged


def test_pictures_go_where_the_first_process_puts_them(
    run: Callable[..., list[QualityRecord]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conditions = {"model": "first", "width": 32, "height": 32, "steps": 2}
    first = PictureStore(tmp_path / "results" / "evaluate.jsonl", conditions)

    class Alone(Processes):
        def gather(self, mine: object) -> list:
            return [first if isinstance(mine, PictureStore) else mine]

    team = contextlib.nullcontext(Alone(0, 1, CPU))
    monkeypatch.setattr("tokenmerge_tools.evaluate.runner.processes", lambda device: team)
    run(limit=1)
    assert {path.parent.parent for path in tmp_path.rglob("*.png")} == {first.folder}


def test_without_a_launcher_there_is_one_process() -> None:
    with processes("cpu") as team:
        assert (team.index, team.count, team.device, team.is_main) == (0, 1, CPU, True)
        assert team.gather("mine") == ["mine"]


def test_one_device_is_not_for_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each process has its own device, got 'cuda:0'"):
        processes("cuda:0").__enter__()


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_processes_find_the_figures_of_one(
    run: Callable[..., list[QualityRecord]], models: Path, prompts: Path, tmp_path: Path
) -> None:
    metrics = tuple(f"{name}={models / 'dino'}" for name in ("dino", "fid", "kid"))
    alone = run(metrics=metrics, seeds=3)
    out = tmp_path / "two" / "evaluate.jsonl"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    # With --cpu, several processes would need MPI.
    launch += ["--multi_gpu"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    command = [
        "evaluate",
        "--device",
        "cpu",
        "--model",
        str(models / "tiny"),
        "--prompts",
        str(prompts),
        "--steps",
        "2",
    ]
    command += ["--variant", "tome", "--ratio", "0.5"]
    command += ["--seeds", "3", "--batch", "2", "-o", str(out), *(f"--metric={m}" for m in metrics)]
    done = subprocess.run(
        [*launch, "-m", "tokenmerge_tools", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes share the prompts" in done.stderr
    assert done.stdout.count("tome ratio=0.5") == 1
    assert done.stderr.count("drawing") == 1  # only one process shows its progress
    results = read_results([out])
    # Except for the times, figures are bit-equal: the same batches ran, each in one of the processes.
    times = {"speedup": None, "speedup_quartiles": None}
    untimed = [[dataclasses.replace(one, **times) for one in found] for found in (results.quality, alone)]
    assert untimed[0] == untimed[1]
    assert all(record.speedup > 0 for record in results.quality if record.variant != "dense")
    assert len(list(out.parent.rglob("*.png"))) == 3 * 3 * 2
    assert len(results.samples) == 3
