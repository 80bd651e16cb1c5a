"""The metrics of an evaluation: their names, their networks, and how they are computed."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmerge.errors import ConfigError, MissingExtraError
from tokenmerge_tools.closeness import motion, motion_error, psnr, ssim
from tokenmerge_tools.demo.glyphs import asked_for
from tokenmerge_tools.demo.retrieval import Gallery
from tokenmerge_tools.evaluate.lpips import Lpips
from tokenmerge_tools.evaluate.networks import (
    INCEPTION,
    Clip,
    Inception,
    Network,
    Vision,
    frechet_distance,
    kernel_distance,
)
from tokenmerge_tools.files import is_folder
from tokenmerge_tools.sheets import as_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

ALL = "all"
_PIXELWISE = {"psnr": psnr, "ssim": ssim}
_GLYPHS = "glyphs"
_CLIP = "openai/clip-vit-large-patch14"
# The default network of each metric.
_NETWORKS = {
    "lpips": "alex",
    "dino": "facebook/dinov2-base",
    "clip": _CLIP,
    "clip-score": _CLIP,
    "fid": INCEPTION,
    "kid": INCEPTION,
}
_DISTANCES = {"fid": frechet_distance, "kid": kernel_distance}

METRIC_NAMES = (*_PIXELWISE, *_NETWORKS, _GLYPHS)

# (b pictures, the dense pictures of the same seeds, their prompts) → values [b]
Measure = Callable[[Sequence["Image"], Sequence["Image"], Sequence[str]], Tensor]

# Metrics of a video: (its frames, frames of the dense video with the same seed) → one number.
MOTION: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"motion": motion, "motion-error": motion_error}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A requested metric, with its network if it has one.

    A metric that the user named raises an error if it cannot work here. Any other is left out.
    """

    name: str
    network: str | None
    by_name: bool


@dataclasses.dataclass(frozen=True)
class PictureMetric:
    """A metric with one value for each picture. One ``beside_dense`` has no value for dense itself."""

    name: str
    measure: Measure
    beside_dense: bool


@dataclasses.dataclass(frozen=True)
class SetMetric:
    """A distance between two sets of pictures, by the features [n, d] and [m, d] of one network."""

    name: str
    network: str
    distance: Callable[[Tensor, Tensor], float]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """All metrics of an evaluation.

    ``features`` are the networks of the distances, by name, ``networks`` the name of the network of each
    metric that has one, and ``loaded`` all networks.
    """

    of_pictures: tuple[PictureMetric, ...]
    of_sets: tuple[SetMetric, ...]
    features: dict[str, Network]
    networks: dict[str, str]
    loaded: tuple[Any, ...]

    def to(self, device: torch.device) -> None:
        """Move the weights of all networks."""
        for network in self.loaded:
            network.to(device)


def parse_metrics(texts: Sequence[str]) -> list[Wanted]:
    """Read ``NAME``, ``NAME=NETWORK`` or ``"all"``. PSNR and SSIM are always included.

    >>> [wanted.name for wanted in parse_metrics(["kid"])]
    ['psnr', 'ssim', 'kid']
    """
    found = {name: Wanted(name, None, by_name=False) for name in _PIXELWISE}
    for text in texts:
        name, equals, network = text.partition("=")
        if text == ALL:
            every = (*_NETWORKS, _GLYPHS)
            found |= {n: Wanted(n, _NETWORKS.get(n), by_name=False) for n in every if n not in found}
            continue
        if name not in METRIC_NAMES:
            raise ConfigError(f"metric: expected some of {', '.join(METRIC_NAMES)}, {ALL}, got {text!r}")
        if equals and (name not in _NETWORKS or not network):
            raise ConfigError(
                f"metric: expected NAME=NETWORK for one of {', '.join(_NETWORKS)}, got {text!r}"
            )
        found[name] = Wanted(name, network or _NETWORKS.get(name), by_name=True)
    return list(found.values())


def load_metrics(wanted: Sequence[Wanted], prompts: Sequence[str], on_note: Callable[[str], None]) -> Metrics:
    """Load all networks on the CPU.

    ``on_note`` is called with messages about weights to download, and about metrics that are left out.
    """
    if importlib.util.find_spec("torchmetrics") is None:
        raise MissingExtraError(
            "tokenmerge-tools[metrics]", needed_by="tokenmerge evaluate needs torchmetrics"
        )
    loader = _Loader()
    of_pictures, of_sets = [], []
    networks: dict[str, str] = {}
    for one in wanted:
        if one.network is not None and not is_folder(Path(one.network)):
            on_note(f"{one.name} needs the weights of {one.network}, which are downloaded if missing")
        try:
            if one.name in _DISTANCES:
                loader.features(one.network or "")
                of_sets.append(SetMetric(one.name, one.network or "", _DISTANCES[one.name]))
            else:
                beside_dense = one.name not in ("clip-score", _GLYPHS)
                measure = loader.measure(one.name, one.network or "", prompts)
                of_pictures.append(PictureMetric(one.name, measure, beside_dense))
        except ConfigError as error:
            if one.by_name:
                raise ConfigError(
                    f"metric {one.name}: {error}; leave it out, or use {ALL} for every metric that works here"
                ) from error
            on_note(f"{one.name} is left out: {error}")
        else:
            networks |= {one.name: one.network} if one.network is not None else {}
    features = {metric.network: loader.features(metric.network) for metric in of_sets}
    return Metrics(tuple(of_pictures), tuple(of_sets), features, networks, tuple(loader.loaded.values()))


class _Loader:
    """Tries to load each network only once, even if several metrics use it."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[str, str], Any] = {}
        self.failed: dict[tuple[str, str], ConfigError] = {}

    def measure(self, name: str, network: str, prompts: Sequence[str]) -> Measure:
        if name in _PIXELWISE or name == "lpips":
            pixelwise = _PIXELWISE.get(name) or self._network(Lpips, network)
            return lambda pictures, dense, _: pixelwise(as_tensor(pictures), as_tensor(dense))
        if name == "clip-score":
            return _clip_score(self._network(Clip, network))
        if name == _GLYPHS:
            return _glyphs(prompts)
        return _Similarity(self._network(Clip if name == "clip" else Vision, network))

    def features(self, network: str) -> Network:
        loaded: Network = self._network(Inception if network == INCEPTION else Vision, network)
        return loaded

    def _network(self, kind: Callable[[str], Any], name: str) -> Any:
        key = (kind.__name__, name)
        if key in self.failed:
            raise self.failed[key]
        if key not in self.loaded:
            try:
                self.loaded[key] = kind(name)
            except ConfigError as error:
                self.failed[key] = error
                raise
        return self.loaded[key]


class _Similarity:
    """Cosine similarity between the features of a picture and of the dense picture."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._dense: tuple[Sequence[Image], Tensor] | None = None

    def __call__(self, pictures: Sequence[Image], dense: Sequence[Image], prompts: Sequence[str]) -> Tensor:
        # All variants of a batch are compared with the same dense pictures.
        if self._dense is None or self._dense[0] is not dense:
            self._dense = dense, self.network(dense)
        return torch.cosine_similarity(self.network(pictures), self._dense[1])


def _clip_score(network: Clip) -> Measure:
    """Return the CLIP score (Hessel et al. 2021, arXiv 2104.08718) of picture and prompt, from 0 to 100.

    The one in torchmetrics does not accept the outputs of transformers 5.
    """
    return lambda pictures, dense, prompts: (
        100 * torch.cosine_similarity(network(pictures), network.texts(prompts)).clamp(min=0)
    )


def _glyphs(prompts: Sequence[str]) -> Measure:
    """Measure 1 for a picture that shows the glyph in its prompt, otherwise 0."""
    if other := [prompt for prompt in prompts if asked_for(prompt) is None]:
        raise ConfigError(f"the prompt {other[0]!r} names no glyph of the bundled models")
    gallery = Gallery()

    def measure(pictures: Sequence[Image], dense: Sequence[Image], prompts: Sequence[str]) -> Tensor:
        asked = [meant[0] for prompt in prompts if (meant := asked_for(prompt))]
        found = [gallery.identify(picture)[0] for picture in pictures]
        return torch.tensor([a == f for a, f in zip(asked, found, strict=True)]).float()

    return measure
