"""Trained networks that compute features of pictures, and distances between the features of two sets."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError, reason_of
from tokenmerge_tools.sheets import as_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

INCEPTION = "inception-v3"
_SUBSETS = 100
_LARGEST_SUBSET = 1000
_SEED = 0
# The features of all processes are already gathered, and only the first process computes the distance.
_ALONE = {"sync_on_compute": False}


class Network(Protocol):
    """A network that turns pictures into features."""

    def to(self, device: torch.device) -> None:
        """Move its weights."""

    def __call__(self, pictures: Sequence[Image]) -> Tensor:
        """Return the features [b, d] of b pictures, float32 on the CPU."""


class Vision:
    """A vision model of transformers with its own preprocessing, such as DINOv2 or CLIP's image tower.

    Its features are the model's pooled output, or the mean over the tokens if it has none.
    """

    def __init__(self, model: str) -> None:
        import transformers

        with _loading(model):
            # Load the config first, so that an unreachable hub is tried for one file only.
            config = transformers.AutoConfig.from_pretrained(model)
            self.model = transformers.AutoModel.from_pretrained(model, config=config).eval()
            self.processor = transformers.AutoImageProcessor.from_pretrained(model)

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self.model.to(device)

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Image]) -> Tensor:
        """Return the features [b, d] of b pictures."""
        inputs = self.processor(images=list(pictures), return_tensors="pt").to(self.model.device)
        describe = getattr(self.model, "get_image_features", self.model)
        return _pooled(describe(**inputs))


class Clip(Vision):
    """CLIP (Radford et al. 2021, arXiv 2103.00020), which maps pictures and texts into one space."""

    def __init__(self, model: str) -> None:
        import transformers

        super().__init__(model)
        if not hasattr(self.model, "get_text_features"):
            raise ConfigError(f"{type(self.model).__name__} in {model} has no text encoder; use a CLIP model")
        with _loading(model):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Tensor:
        """Return the features [b, d] of b texts, which are truncated to the model's context length."""
        longest = self.model.config.text_config.max_position_embeddings
        inputs = self.tokenizer(
            list(prompts), return_tensors="pt", padding=True, truncation=True, max_length=longest
        ).to(self.model.device)
        return _pooled(self.model.get_text_features(**inputs))


class Inception:
    """The Inception network of published FIDs, from torchmetrics and torch-fidelity."""

    def __init__(self, name: str) -> None:
        with _loading(name):
            from torchmetrics.image.fid import FrechetInceptionDistance

            self.model = FrechetInceptionDistance(feature=2048).inception

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self.model.to(device)

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Image]) -> Tensor:
        """Return the features [b, 2048] of b pictures, which may differ in size."""
        device = next(self.model.parameters()).device
        pixels = ((as_tensor([picture]) * 255).round().byte().to(device) for picture in pictures)
        return torch.cat([self.model(picture) for picture in pixels]).float().cpu()


def _pooled(output: Any) -> Tensor:
    if not isinstance(output, Tensor):  # transformers 4 returns a tensor for CLIP
        pooled = output.pooler_output
        output = output.last_hidden_state.mean(dim=1) if pooled is None else pooled
    return output.flatten(start_dim=1).float().cpu()


@contextlib.contextmanager
def _loading(what: str) -> Iterator[None]:
    """Turn the various errors of loading a network into a ``ConfigError`` of one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"cannot load {what} ({reason_of(error)})") from error


def frechet_distance(features: Tensor, reference: Tensor) -> float:
    """Return the Fréchet distance of two Gaussians (Heusel et al. 2017, arXiv 1706.08500), the one of FID.

    Lower is closer. With few pictures it is biased upwards, so compare only sets of equal size. The features
    are [n, d] and [m, d] with n, m ≥ 2.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    return float(
        _measured(FrechetInceptionDistance(feature=_as_they_are(features), **_ALONE), features, reference)
    )


def kernel_distance(features: Tensor, reference: Tensor) -> float:
    """Return the squared maximum mean discrepancy with a cubic kernel (arXiv 1801.01401): KID.

    It is unbiased, so it suits few pictures. For similar sets it may be negative. Two sets of equal size, up
    to a thousand pictures, are compared as a whole. Otherwise the result is the mean over 100 fixed subsets
    of at most a thousand. The features are [n, d] and [m, d] with n, m ≥ 2.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(len(features), len(reference), _LARGEST_SUBSET)
    subsets = 1 if {len(features), len(reference)} == {size} else _SUBSETS
    # torchmetrics warns that storing the features takes memory, where they are already. It draws the subsets
    # from the global generator.
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance` will save")
        torch.manual_seed(_SEED)
        measure = KernelInceptionDistance(
            feature=_as_they_are(features), subsets=subsets, subset_size=size, **_ALONE
        )
        mean, _ = _measured(measure, features, reference)
    return float(mean)


def _measured(measure: Any, features: Tensor, reference: Tensor) -> Any:
    measure.update(reference.double(), real=True)
    measure.update(features.double(), real=False)
    return measure.compute()


def _as_they_are(features: Tensor) -> nn.Module:
    extractor = nn.Identity()
    extractor.num_features = features.shape[1]  # type: ignore[assignment]
    return extractor
