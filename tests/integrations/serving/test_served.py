"""What the plug-ins do with a pipeline, without a server."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenmerge import ConfigError, UnsupportedModelError, token_merging
from tokenmerge.default_method import settings_for
from tokenmerge.integrations.serving import ServedPipeline, by_environment, is_asked

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
LOG = logging.getLogger(__name__)
GROUPS = {"vllm_omni": "vllm_omni.general_plugins", "sglang": "sglang.multimodal_gen.plugins"}


@pytest.mark.parametrize("server", GROUPS)
def test_an_entry_point_loads_nothing_heavy_until_it_is_asked(server):
    """It runs without the server, without torch, and with empty settings."""
    point = f"tokenmerge.integrations.serving.{server}:register"
    declared = f'[project.entry-points."{GROUPS[server]}"]\ntokenmerge = "{point}"\n'
    assert declared in PROJECT.read_text(encoding="utf-8")
    script = (
        "import os, sys; from importlib.metadata import EntryPoint\n"
        "os.environ.update(TOKENMERGE_SPEEDUP='', TOKENMERGE_SETTINGS='')\n"
        f"EntryPoint('tokenmerge', {point!r}, '').load()()\n"
        "print([name for name in ('torch', 'diffusers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_the_environment_asks_for(monkeypatch):
    monkeypatch.delenv("TOKENMERGE_SPEEDUP", raising=False)
    monkeypatch.delenv("TOKENMERGE_SETTINGS", raising=False)
    assert not is_asked()
    monkeypatch.setenv("TOKENMERGE_SPEEDUP", "2")
    assert is_asked()
    assert by_environment() == 2.0
    for wrong in ("fast", "0.5", "nan", "inf", "-1"):
        monkeypatch.setenv("TOKENMERGE_SPEEDUP", wrong)
        with pytest.raises(
            ConfigError, match=r"TOKENMERGE_SPEEDUP: expected a number ≥ 1, such as 2\.0, got"
        ):
            by_environment()
    monkeypatch.setenv("TOKENMERGE_SETTINGS", "tuned.json")
    with pytest.raises(ConfigError, match="expected one of them"):
        by_environment()
    monkeypatch.setenv("TOKENMERGE_SPEEDUP", "")
    assert by_environment() == "tuned.json"


def draw(pipe, steps=12):
    call = {"num_inference_steps": steps, "generator": torch.manual_seed(0), "output_type": "pt"}
    return pipe("a", **call).images


def test_each_generation_has_the_plan_for_its_steps(pipe):
    ServedPipeline(pipe, 1.1, LOG)
    served = [draw(pipe, steps) for steps in (8, 12)]
    for steps, picture in zip((8, 12), served, strict=True):
        with token_merging(pipe, settings_for(pipe, 1.1, 16, 16, steps=steps, guidance=7.5)):
            assert torch.equal(draw(pipe, steps), picture)


def test_a_speedup_in_force_is_not_applied_again(pipe):
    served = ServedPipeline(pipe, 2.0, LOG)
    fast, patch = draw(pipe), pipe.unet._tokenmerge
    served.use(None)
    served.use(2)
    assert pipe.unet._tokenmerge is patch
    served.use(1)
    assert not torch.equal(draw(pipe), fast)
    served.use(2.0)
    assert torch.equal(draw(pipe), fast)


def test_a_request_for_a_speedup_of_an_unsupported_model_is_an_error(caplog):
    pipe = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, LOG.name):  # other libraries change the level of all loggers
        served = ServedPipeline(pipe, 2.0, LOG)
    assert "Linear" in caplog.text
    served.use(None)
    served.use(1)
    with pytest.raises(UnsupportedModelError):
        served.use(2.0)
