"""The recipe of docs/serving.md: a file of prompts, drawn by several processes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image, ImageChops

from tokenmerge import apply_token_merging

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
PROMPTS = ("apple", "car", "", "boat", "tree", "bird", "cloud")


def recipe() -> str:
    (lines,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return lines


def start(folder: Path) -> subprocess.Popen[bytes]:
    # --multi_gpu starts several processes, also where there is no GPU.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", "0", "draw.py"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(launch, cwd=folder, stdout=log, stderr=log)


def kill(running: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and the processes that draw."""
    for process in [*psutil.Process(running.pid).children(recursive=True), running]:
        process.kill()
    running.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("large_grids_alone")  # as in the processes of the recipe
def test_killed_processes_lose_no_prompt(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(recipe().replace("owner/name", str(folder)), encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    running = start(tmp_path)
    try:
        until = time.monotonic() + 600
        while len(first := list((tmp_path / "pictures").glob("*.png"))) < 2:
            assert running.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        kill(running)
    written = {file: file.stat().st_mtime_ns for file in first}

    again = start(tmp_path)
    try:
        assert again.wait(timeout=600) == 0, (tmp_path / "log").read_text()
    finally:
        if again.poll() is None:
            kill(again)
    assert len(list((tmp_path / "pictures").glob("*.png"))) == len(PROMPTS)
    assert {file: file.stat().st_mtime_ns for file in first} == written

    pipe = StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    apply_token_merging(pipe, speedup=2.0)
    for i, prompt in enumerate(PROMPTS):
        alone = pipe(prompt, generator=torch.Generator().manual_seed(i)).images[0]
        with Image.open(tmp_path / "pictures" / f"{i:06}.png") as drawn:
            assert ImageChops.difference(alone, drawn).getbbox() is None
