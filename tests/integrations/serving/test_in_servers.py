"""The plug-ins, found by the servers' own loaders and called by their own adapters."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from servers import SERVERS, Outside, SGLang, VllmOmni
from tiny_pipeline import write_pipeline

from tokenmerge import ConfigError, ToMeConfig, UnsupportedModelError
from tokenmerge.config import save_config
from tokenmerge.models import undescribed

BOTH = pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.__name__)


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    for name in ("TOKENMERGE_SPEEDUP", "TOKENMERGE_SETTINGS"):
        monkeypatch.delenv(name, raising=False)
    for server in SERVERS:  # what the plug-ins replace comes back after the test
        for owner, name, _ in server.hooked:
            monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("served") / "pipeline")


@pytest.fixture(scope="module")
def outside(folder):
    return Outside(folder).draw


@pytest.fixture
def lines(caplog):
    """What the servers' loggers write about token merging."""
    for server in SERVERS:
        caplog.set_level(logging.INFO, logger=server.log.name)
        server.log.addHandler(caplog.handler)
    yield lambda: list(dict.fromkeys(line.getMessage() for line in caplog.records if "token m" in line.msg))
    for server in SERVERS:
        server.log.removeHandler(caplog.handler)


@BOTH
def test_pictures_are_those_of_the_pipeline_outside(server, folder, outside, lines, monkeypatch):
    monkeypatch.setenv("TOKENMERGE_SPEEDUP", "2.0")
    server.load_plugins(monkeypatch)
    served = server(folder)
    (line,) = lines()
    assert line.startswith("token merging: 2×\n")
    assert "× by operations, " in line
    assert " MB cached; closeness to dense: " in line
    assert torch.equal(served.draw(), outside(2.0))
    assert not torch.equal(outside(2.0), outside(1.0))

    assert torch.equal(served.draw(speedup=1.5), outside(1.5))
    assert not torch.equal(outside(1.5), outside(2.0))
    assert torch.equal(served.draw(speedup=1), outside(1.0))
    assert torch.equal(served.draw(), outside(2.0))
    assert [line.split(": ")[1] for line in lines()[1:]] == ["1.5×", "dense", "2×"]

    for wrong in ("fast", 0.5, True, float("nan"), [2.0]):
        with pytest.raises(ConfigError, match="speedup: expected"):
            served.draw(speedup=wrong)
    assert torch.equal(served.draw(speedup=1000), outside(1000.0))  # as fast as it goes
    assert torch.equal(served.draw(), outside(2.0))

    def cancel(pipe, step, *_):
        if step == 9:
            raise KeyboardInterrupt
        return {}

    for speedup in (None, 1.5):
        with pytest.raises(KeyboardInterrupt):
            served.draw(speedup=speedup, callback=cancel)
        assert torch.equal(served.draw(seed=8), outside(2.0, seed=8))


@BOTH
def test_without_a_setting_nothing_changes(server, folder, outside, monkeypatch):
    before = [getattr(owner, name) for owner, name, _ in server.hooked]
    server.load_plugins(monkeypatch)
    assert [getattr(owner, name) for owner, name, _ in server.hooked] == before
    assert torch.equal(server(folder).draw(), outside(1.0))


@BOTH
def test_a_file_of_settings(server, folder, outside, tmp_path, monkeypatch):
    settings = ToMeConfig(ratio=0.5, max_downsample=2)
    save_config(settings, tmp_path / "tuned.json")
    monkeypatch.setenv("TOKENMERGE_SETTINGS", str(tmp_path / "tuned.json"))
    server.load_plugins(monkeypatch)
    served = server(folder)
    assert torch.equal(served.draw(), outside(settings))
    assert torch.equal(served.draw(speedup=1), outside(1.0))
    assert torch.equal(served.draw(), outside(settings))


@BOTH
def test_a_speedup_of_one_waits_for_requests(server, folder, outside, lines, monkeypatch):
    monkeypatch.setenv("TOKENMERGE_SPEEDUP", "1")
    server.load_plugins(monkeypatch)
    served = server(folder)
    assert lines() == ["token merging: dense"]
    assert torch.equal(served.draw(), outside(1.0))


@BOTH
@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            {"TOKENMERGE_SPEEDUP": "fast"},
            "TOKENMERGE_SPEEDUP: expected a number ≥ 1, such as 2.0, got 'fast'",
        ),
        ({"TOKENMERGE_SPEEDUP": "0.5"}, "TOKENMERGE_SPEEDUP: expected a number ≥ 1, such as 2.0, got 0.5"),
        ({"TOKENMERGE_SETTINGS": "nowhere.json"}, "nowhere.json"),
        (
            {"TOKENMERGE_SPEEDUP": "2", "TOKENMERGE_SETTINGS": "a.json"},
            "TOKENMERGE_SPEEDUP, TOKENMERGE_SETTINGS: expected one of them, got '2' and 'a.json'; unset the",
        ),
    ],
)
def test_a_wrong_setting_stops_the_server(server, environment, problem, folder, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server.load_plugins(monkeypatch)
    with pytest.raises(ConfigError) as error:
        server(folder)
    assert problem in str(error.value)


@BOTH
def test_a_model_that_is_not_supported_is_served_dense(server, tmp_path, lines, monkeypatch):
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(tmp_path / "ddpm")
    # As if another library had written it: step reuse speeds up any denoiser of diffusers.
    monkeypatch.delitem(undescribed.REASONS, "UNet2DModel")
    monkeypatch.setattr(undescribed, "is_of_diffusers", lambda module: False)
    monkeypatch.setenv("TOKENMERGE_SPEEDUP", "2.0")
    server.load_plugins(monkeypatch)
    served = server(tmp_path / "ddpm")
    (line,) = lines()
    assert line.startswith("token merging: the model is served dense: ")
    assert "UNet2DModel" in line
    assert served.pipe.unet.__class__ is UNet2DModel
    assert len(served.draw(steps=3)) == 1
    with pytest.raises(UnsupportedModelError):
        served.draw(steps=3, speedup=2.0)
    assert len(lines()) == 1


@BOTH
def test_what_is_hooked_is_there(server):
    """It fails when a server renames what the plug-in hooks, or calls it in another way."""
    for owner, name, parameters in server.hooked:
        assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


def test_vllm_omni_gives_the_adapter_one_request_at_a_time():
    (adapter, *_), _ = VllmOmni.hooked
    assert adapter.supports_request_batch is False


def test_sglang_batches_no_requests_of_different_speedups(folder):
    from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler

    server = SGLang(folder)
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.server_args = server.args
    same, other, none = (server.request(speedup=speedup) for speedup in (2.0, 1.5, None))
    assert scheduler._can_dynamic_batch(same, server.request(speedup=2.0, seed=9))
    assert not scheduler._can_dynamic_batch(same, other)
    assert not scheduler._can_dynamic_batch(same, none)
