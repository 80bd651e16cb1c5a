"""FID and KID: distances between two sets of images, by the features of a network."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.networks import Vision, loading
from tokenmerge_tools.files import open_picture
from tokenmerge_tools.sheets import as_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

DISTANCES = ("fid", "kid")
INCEPTION = "inception-v3"
# The features of a set of images by network, in batches [b, d].
Features = Mapping[Vision, Sequence[Tensor]]

_FILES = (".png", ".jpg", ".jpeg", ".webp")
_ENOUGH_FOR_FID = 2048  # with fewer images, FID depends more on their number than on their content
# The number of subsets of KID, and the largest size of one, as in its paper.
_SUBSETS = 100
_LARGEST_SUBSET = 1000


class Inception(Vision):
    """The Inception network of published FIDs, which torchmetrics takes from torch-fidelity."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("torch_fidelity") is None:
            raise ConfigError(
                f"its network {name} comes with torch-fidelity, which is not installed; run: pip install "
                "torch-fidelity; or name a network of transformers, as NAME=facebook/dinov2-base"
            )
        with loading(name):
            from torchmetrics.image.fid import FrechetInceptionDistance

            self.model = FrechetInceptionDistance(feature=2048).inception

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> Tensor:
        """Return the features [b, 2048] of b images of one size, float32 on the CPU."""
        pixels = (as_tensor(images) * 255).round().byte()
        features: Tensor = self.model(pixels.to(next(self.model.parameters()).device))
        return features.float().cpu()


def pictures_in(folder: Path) -> list[Path]:
    """Find the reference images in a folder and its subfolders. There must be at least two."""
    # A leading dot marks hidden files, and images that are still being written.
    found = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in _FILES and not path.name.startswith(".")
    )
    if len(found) < 2:
        raise ConfigError(
            f"reference: expected a folder with at least 2 images ({', '.join(_FILES)}), got {folder} with "
            f"{len(found)}"
        )
    return found


def features_of(folder: Path, networks: Iterable[Vision]) -> Features:
    """Compute the features of the reference images in a folder, which may differ in size."""
    found: dict[Vision, list[Tensor]] = {network: [] for network in networks}
    for path in pictures_in(folder):
        image = open_picture(path, "reference", "leave it out of the folder")
        for network, features in found.items():
            features.append(network([image]))
    return found


def check_count(metrics: Iterable[str], images: int, on_note: Callable[[str], None]) -> None:
    """Refuse the distances of a single image, and note that the FID of few images is biased."""
    names = [name for name in metrics if name in DISTANCES]
    if names and images < 2:
        raise ConfigError(f"{', '.join(names)}: expected at least 2 images, got {images}; add --seeds 2")
    if "fid" in names and images < _ENOUGH_FOR_FID:
        on_note(f"fid of only {images} images is biased upwards; kid is unbiased")


def distance(name: str, features: Tensor, reference: Tensor) -> float:
    """Return ``"fid"`` or ``"kid"`` of two sets of features [n, d] and [m, d], n, m ≥ 2. Lower is closer.

    FID is the Fréchet distance of two Gaussians (Heusel et al. 2017, arXiv 1706.08500). With few images it
    is biased upwards, so compare only sets of equal size.

    KID is the squared maximum mean discrepancy with a cubic kernel (arXiv 1801.01401), the mean over fixed
    subsets of at most a thousand images. It is unbiased, and for similar sets it may be negative.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    as_they_are: Any = nn.Identity()
    as_they_are.num_features = features.shape[1]
    size = min(len(features), len(reference), _LARGEST_SUBSET)
    # torchmetrics draws the subsets from the global generator, and warns that it stores the features.
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance` will save")
        torch.manual_seed(0)
        measure: Any = (
            FrechetInceptionDistance(as_they_are)
            if name == "fid"
            else KernelInceptionDistance(as_they_are, subsets=_SUBSETS, subset_size=size)
        )
        measure.update(reference.double(), real=True)
        measure.update(features.double(), real=False)
        found = measure.compute()
    return float(found if name == "fid" else found[0])
