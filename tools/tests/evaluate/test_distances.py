from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm
from tools.tests.evaluate.conftest import picture
from torchmetrics.image import fid

from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.distances import (
    Inception,
    check_count,
    distance,
    features_of,
    pictures_in,
)
from tokenmerge_tools.evaluate.metrics import load_metrics, parse_metrics


def sets(n: int, m: int, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(d, d, generator=generator)
    return torch.randn(n, d, generator=generator) @ mix, torch.randn(m, d, generator=generator) + 0.5


def test_the_frechet_distance_is_its_formula() -> None:
    one, two = (features.double().numpy() for features in sets(40, 50))
    covariances = [np.cov(features, rowvar=False) for features in (one, two)]
    root = sqrtm(covariances[0] @ covariances[1]).real
    apart = one.mean(axis=0) - two.mean(axis=0)
    expected = apart @ apart + np.trace(covariances[0] + covariances[1] - 2 * root)
    # Both take the square root of eigenvalues in double precision.
    assert distance("fid", *sets(40, 50)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [2, 30])
def test_the_kernel_distance_of_equally_many_is_its_formula_over_all(count: int) -> None:
    one, two = (features.double().numpy() for features in sets(count, count))

    def kernel(a, b):
        return (a @ b.T / a.shape[1] + 1) ** 3

    def mean_without_diagonal(k):
        return (k.sum() - np.trace(k)) / (count * (count - 1))

    expected = (
        mean_without_diagonal(kernel(one, one))
        + mean_without_diagonal(kernel(two, two))
        - 2 * kernel(one, two).mean()
    )
    assert distance("kid", *sets(count, count)) == pytest.approx(expected, rel=1e-9)


def test_the_kernel_distance_of_subsets_is_always_the_same_and_leaves_the_generator_alone() -> None:
    one, two = sets(20, 33)
    state = torch.random.get_rng_state()
    first = distance("kid", one, two)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(7)
    assert distance("kid", one, two) == first


def test_equal_sets_are_no_distance_apart() -> None:
    one, two = sets(40, 40)
    assert distance("fid", one, one) == pytest.approx(0, abs=1e-6)
    assert distance("fid", one, two) > 1
    assert distance("kid", one, one) < 0 < distance("kid", one, two)


# --- the network ----------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, torch_fidelity: object) -> None:
    """Let the package be found or not, and nothing else."""
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: torch_fidelity if name == "torch_fidelity" else original(name, *rest),
    )


def test_without_torch_fidelity_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(
        ConfigError, match=r"metric kid: .*pip install torch-fidelity; or name a network .*or leave it out"
    ):
        load_metrics(parse_metrics(["kid"]), ["a"], lambda note: None)


def test_inception_gets_the_bytes_of_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flat(torch.nn.Module):
        """Its features are its input."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            assert pixels.dtype == torch.uint8
            return pixels.flatten(1).double()

    installed(monkeypatch, object())
    monkeypatch.setattr(
        fid, "FrechetInceptionDistance", lambda feature: SimpleNamespace(inception={2048: Flat()}[feature])
    )
    metrics = load_metrics(parse_metrics(["fid", "kid"]), ["a"], lambda note: None)
    assert metrics.networks == dict.fromkeys(("fid", "kid"), "inception-v3")
    (network,) = metrics.loaded
    assert isinstance(network, Inception)
    found = network([picture(0), picture(1)])
    assert found.dtype == torch.float32
    expected = [np.asarray(picture(seed)).transpose(2, 0, 1).ravel() for seed in (0, 1)]
    assert np.array_equal(found.numpy(), np.stack(expected))


def test_inception_runs_where_its_libraries_import() -> None:
    try:
        network = Inception("inception-v3")
    except ConfigError as error:
        pytest.skip(f"not here: {error}")
    assert network([picture(0), picture(1)]).shape == (2, 2048)


# --- the images ---------------------------------------------------------------------------------


def test_reference_pictures_lie_in_subfolders_and_differ_in_size(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name, side in (("below/a.PNG", 20), ("b.jpg", 40), (".c.png", 8), ("d.txt", 8)):
        picture(0, side).save(tmp_path / name, format="PNG")
    assert [path.name for path in pictures_in(tmp_path)] == ["b.jpg", "a.PNG"]

    def sides(pictures: list[Image.Image]) -> torch.Tensor:
        return torch.tensor([[float(one.width), 1.0] for one in pictures])

    (features,) = features_of(tmp_path, [sides, sides]).values()
    assert torch.cat(features).tolist() == [[40.0, 1.0], [20.0, 1.0]]
    (tmp_path / "below" / "broken.png").write_text("no image")
    with pytest.raises(
        ConfigError, match=r"reference: cannot read .*broken\.png .*leave it out of the folder"
    ):
        features_of(tmp_path, [sides])


def test_a_folder_without_two_pictures_is_refused(tmp_path: Path) -> None:
    for name in (".a-unfinished.png", ".b.png", "c.png"):
        picture(0).save(tmp_path / name)
    for folder, count in ((tmp_path, 1), (tmp_path / "none", 0)):
        with pytest.raises(
            ConfigError, match=rf"reference: expected a folder with at least 2 .*with {count}$"
        ):
            pictures_in(folder)


def test_few_pictures_are_noted_and_a_single_one_is_refused() -> None:
    notes: list[str] = []
    check_count(["psnr", "kid"], 2, notes.append)
    check_count(["psnr"], 1, notes.append)
    check_count(["fid"], 2048, notes.append)
    assert notes == []
    check_count(["fid"], 2047, notes.append)
    assert notes == ["fid of only 2047 images is biased upwards; kid is unbiased"]
    with pytest.raises(ConfigError, match=r"fid, kid: expected at least 2 images, got 1; add --seeds 2"):
        check_count(["psnr", "fid", "kid"], 1, notes.append)
