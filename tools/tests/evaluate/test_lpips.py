"""LPIPS without torchvision, compared with the LPIPS of torchmetrics, which needs it for the backbone."""

from __future__ import annotations

import urllib.error
from pathlib import Path

import pytest
import torch
from tools.tests.evaluate.conftest import picture
from torchmetrics.functional.image import lpips as theirs

from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.metrics import load_metrics, parse_metrics
from tokenmerge_tools.evaluate.networks import Distance, Lpips
from tokenmerge_tools.sheets import as_tensor

FILE = "alexnet-owt-7be5be79.pth"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of torch.hub, without internet access."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()

    def unreachable(*arguments: object, **options: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    return tmp_path / "checkpoints"


def save_random_weights(hub: Path) -> Distance:
    """Save a file like torchvision's, with the convolutions and a classifier that is not used."""
    net = Distance()
    weights = {f"features.{key}": value for key, value in net.features.state_dict().items()}
    torch.save({**weights, "classifier.1.weight": torch.zeros(1)}, hub / FILE)
    return net


def test_distances_are_those_of_torchmetrics(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same random backbone, and the channel weights that torchmetrics ships."""
    net = save_random_weights(hub)
    # AlexNet (Krizhevsky 2014) without its classifier.
    assert sum(weight.numel() for weight in net.features.parameters()) == 2_469_696
    monkeypatch.setattr(theirs, "_get_tv_model_features", lambda *_: net.features)
    expected = theirs._LPIPS(net="alex", pnet_rand=True)
    first, second = torch.rand(2, 3, 70, 81), torch.rand(2, 3, 70, 81)
    got = Lpips()(first, second)
    assert got.min() > 0
    # Sums over up to 384 channels and 70 · 81 positions in another order differ by a few roundings of 2⁻²⁴.
    torch.testing.assert_close(got, expected(first, second, normalize=True).flatten(), rtol=1e-5, atol=0)


def test_the_metric_works_on_pictures_without_torchvision(hub: Path) -> None:
    save_random_weights(hub)
    metrics = load_metrics(parse_metrics(["lpips"]), ["a", "b"], lambda note: None)
    (lpips,) = [metric for metric in metrics.of_pictures if metric.name == "lpips"]
    dense, other = [picture(0, 64), picture(1, 64)], [picture(0, 64), picture(2, 64)]
    same, different = lpips.measure(other, dense, ["a", "b"])
    assert same == 0
    assert different > 0
    torch.testing.assert_close(different, Lpips()(as_tensor(other[1:]), as_tensor(dense[1:]))[0])
    assert metrics.networks == {"lpips": "alex"}


def test_weights_that_cannot_be_downloaded_are_named_before_the_run(hub: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_metrics(parse_metrics(["lpips"]), ["a"], lambda note: None)
    message = str(caught.value)
    assert message.startswith("metric lpips: cannot load its weights (<urlopen error no route to host>)")
    assert f"save https://download.pytorch.org/models/{FILE} in {hub}" in message


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", None], ids=["empty", "no file of torch", "other names"]
)
def test_a_file_of_other_weights_is_refused(content: bytes | None, hub: Path) -> None:
    file = hub / FILE
    if content is None:
        torch.save({"features.0.weight": torch.zeros(1)}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot load its weights"):
        Lpips()


def test_another_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="metric lpips: expected the network alex, got 'vgg'"):
        load_metrics(parse_metrics(["lpips=vgg"]), ["a"], lambda note: None)
