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
from tokenmerge_tools.evaluate.distances import DISTANCES, INCEPTION, Inception
from tokenmerge_tools.evaluate.networks import Clip, Lpips, Reward, Vision
from tokenmerge_tools.files import is_folder
from tokenmerge_tools.sheets import as_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_PIXELWISE = {"psnr": psnr, "ssim": ssim}
_GLYPHS = "glyphs"
_CLIP = "openai/clip-vit-large-patch14"
# The default network of each metric.
_NETWORKS = {
    "lpips": "alex",
    "dino": "facebook/dinov2-base",
    "clip": _CLIP,
    "clip-score": _CLIP,
    "image-reward": "ImageReward-v1.0",
    **dict.fromkeys(DISTANCES, INCEPTION),
}

OF_PROMPTS = ("clip-score", "image-reward", _GLYPHS)  # metrics that need no dense image
METRIC_NAMES = (*_PIXELWISE, *_NETWORKS, _GLYPHS)
PICTURE_METRICS = tuple(name for name in METRIC_NAMES if name not in DISTANCES)  # a value for each image

# A function of b images, the dense images of the same seeds and their prompts, which returns values [b].
Measure = Callable[[Sequence["Image"], Sequence["Image"], Sequence[str]], Tensor]

# Metrics of a video. Each is a function of its frames and those of the dense video with the same seed.
MOTION: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"motion": motion, "motion-error": motion_error}


@dataclasses.dataclass(frozen=True)
class PictureMetric:
    """A metric with one value for each image. If ``beside_dense`` is true, dense has no value."""

    name: str
    measure: Measure
    beside_dense: bool


@dataclasses.dataclass(frozen=True)
class Metrics:
    """All metrics of an evaluation.

    ``of_sets`` has the network of each distance between sets. ``networks`` has the name of the network of
    each metric that uses one. ``loaded`` has all networks.
    """

    of_pictures: tuple[PictureMetric, ...]
    of_sets: dict[str, Vision]
    networks: dict[str, str]
    loaded: tuple[Any, ...]

    def to(self, device: torch.device) -> None:
        """Move the weights of all networks."""
        for network in self.loaded:
            network.to(device)


def parse_metrics(texts: Sequence[str]) -> dict[str, str | None]:
    """Read ``NAME`` or ``NAME=NETWORK``. Return the network of each metric, or None if it uses none.

    PSNR and SSIM are always included.

    >>> parse_metrics(["dino"])
    {'psnr': None, 'ssim': None, 'dino': 'facebook/dinov2-base'}
    """
    found: dict[str, str | None] = dict.fromkeys(_PIXELWISE)
    for text in texts:
        name, equals, network = text.partition("=")
        if name not in METRIC_NAMES:
            raise ConfigError(f"metric: expected some of {', '.join(METRIC_NAMES)}, got {text!r}")
        if equals and (name not in _NETWORKS or not network):
            raise ConfigError(
                f"metric: expected NAME=NETWORK for one of {', '.join(_NETWORKS)}, got {text!r}"
            )
        found[name] = network or _NETWORKS.get(name)
    return found


def load_metrics(
    wanted: Mapping[str, str | None], prompts: Sequence[str], on_note: Callable[[str], None]
) -> Metrics:
    """Load these metrics, on the CPU. ``on_note`` is called with messages about weights to download."""
    if importlib.util.find_spec("torchmetrics") is None:
        raise MissingExtraError(
            "tokenmerge-tools[metrics]", needed_by="tokenmerge evaluate needs torchmetrics"
        )
    loaded: dict[tuple[str, str], Any] = {}
    of_pictures: list[PictureMetric] = []
    of_sets: dict[str, Vision] = {}

    def load(kind: Callable[[str], Any], network: str) -> Any:
        """Load a network, once for all metrics that use it."""
        key = (kind.__name__, network)
        if key not in loaded:
            loaded[key] = kind(network)
        return loaded[key]

    for name, network in wanted.items():
        if network is not None and not is_folder(Path(network)):
            on_note(f"{name} needs the weights of {network}, which are downloaded if missing")
        try:
            if name in DISTANCES:
                of_sets[name] = load(Inception if network == INCEPTION else Vision, network or "")
            else:
                measure = _measure(name, network or "", prompts, load)
                of_pictures.append(PictureMetric(name, measure, beside_dense=name not in OF_PROMPTS))
        except ConfigError as error:
            raise ConfigError(f"metric {name}: {error}; or leave it out") from error
    networks = {name: network for name, network in wanted.items() if network is not None}
    return Metrics(tuple(of_pictures), of_sets, networks, tuple(loaded.values()))


def _measure(name: str, network: str, prompts: Sequence[str], load: Callable[..., Any]) -> Measure:
    """Make a metric with a value for each image. ``load`` takes the kind of its network, and the name."""
    if name in _PIXELWISE or name == "lpips":
        pixelwise = _PIXELWISE.get(name) or load(Lpips, network)
        return lambda images, dense, _: pixelwise(as_tensor(images), as_tensor(dense))
    if name == "clip-score":
        # The CLIP score of Hessel et al. 2021, arXiv 2104.08718. That of torchmetrics needs transformers 4.
        clip = load(Clip, network)

        def clip_score(images: Sequence[Image], dense: Sequence[Image], prompts: Sequence[str]) -> Tensor:
            return 100 * torch.cosine_similarity(clip(images), clip.texts(prompts)).clamp(min=0)

        return clip_score
    if name == "image-reward":
        reward = load(Reward, network)
        return lambda images, dense, prompts: reward(images, prompts)
    if name == _GLYPHS:
        return _glyphs(prompts)
    return _Similarity(load(Clip if name == "clip" else Vision, network))


class _Similarity:
    """Cosine similarity between the features of an image and of the dense image."""

    def __init__(self, network: Vision) -> None:
        self.network = network
        self._dense: tuple[Sequence[Image], Tensor] | None = None

    def __call__(self, images: Sequence[Image], dense: Sequence[Image], prompts: Sequence[str]) -> Tensor:
        # All variants of a batch are compared with the same dense images.
        if self._dense is None or self._dense[0] is not dense:
            self._dense = dense, self.network(dense)
        return torch.cosine_similarity(self.network(images), self._dense[1])


def _glyphs(prompts: Sequence[str]) -> Measure:
    """Return a measure that is 1 for an image that shows the glyph in its prompt, and 0 otherwise."""
    other = [prompt for prompt in prompts if asked_for(prompt) is None]
    if other:
        raise ConfigError(f"the prompt {other[0]!r} names no glyph of the bundled models")
    gallery = Gallery()

    def measure(images: Sequence[Image], dense: Sequence[Image], prompts: Sequence[str]) -> Tensor:
        meanings = [asked_for(prompt) for prompt in prompts]
        asked = [glyph for glyph, _ in filter(None, meanings)]
        found = [gallery.identify(image)[0] for image in images]
        return torch.tensor([a == f for a, f in zip(asked, found, strict=True)]).float()

    return measure
