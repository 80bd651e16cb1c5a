"""1,000 requests of all kinds through each server's adapter: each gets its image, and nothing is kept."""

from __future__ import annotations

import gc
import random

import psutil
import pytest
import torch
from servers import SERVERS, Outside
from tiny_pipeline import write_pipeline

REQUESTS = 1000
WARM_UP = 200
# What one generation caches is about 0.2 MB here, so a leak in one request of eight would show.
ALLOWED = 20e6


class CancelledError(Exception):
    pass


def live_bytes():
    """Bytes of all tensors that something still holds."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.device.type == "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("served") / "pipeline")


@pytest.fixture(scope="module")
def outside(folder):
    return Outside(folder).draw


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.__name__)
def test_every_picture_is_the_one_drawn_alone_and_memory_is_flat(server, folder, outside, monkeypatch):
    monkeypatch.setenv("TOKENMERGE_SPEEDUP", "2.0")
    for owner, name, _ in server.hooked:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    server.load_plugins(monkeypatch)
    choice = random.Random(0)
    served = server(folder)
    process = psutil.Process()
    for number in range(REQUESTS):
        asked = {
            "side": choice.choice((24, 32)),
            "steps": choice.choices((3, 6, 12), (5, 3, 2))[0],
            "seed": choice.randrange(2),
            "speedup": choice.choice((None, 1, 1.5)),
        }
        if number % 10 == 9:
            last = choice.randrange(asked["steps"])

            def cancel(pipe, step, *_, last=last):
                if step == last:
                    raise CancelledError
                return {}

            with pytest.raises(CancelledError):
                served.draw(**asked, callback=cancel)
            continue
        wanted = float(asked["speedup"] or 2.0)
        expected = outside(wanted, side=asked["side"], steps=asked["steps"], seed=asked["seed"])
        assert torch.equal(served.draw(**asked), expected), (number, asked)
        if number == WARM_UP:
            tensors, resident = live_bytes(), process.memory_info().rss
    assert abs(live_bytes() - tensors) < 1e6
    assert process.memory_info().rss - resident < ALLOWED
