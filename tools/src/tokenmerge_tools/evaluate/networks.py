"""Trained networks: features of images and texts, rewards, and LPIPS on AlexNet in plain PyTorch.

The LPIPS of torchmetrics needs torchvision.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError, reason_of
from tokenmerge_tools.failures import errors_as

if TYPE_CHECKING:
    from PIL.Image import Image


class Vision:
    """A vision model of transformers with its own preprocessing, such as DINOv2 or CLIP's image tower.

    Its features are the model's pooled output, or the mean over the tokens if it has none.
    """

    def __init__(self, model: str) -> None:
        import transformers

        with loading(model):
            # Load the config first, so that an unreachable hub is tried for one file only.
            config = transformers.AutoConfig.from_pretrained(model)
            # The weights are not read from a pickle, which can run code when it is loaded.
            network = transformers.AutoModel.from_pretrained(model, config=config, use_safetensors=True)
            self.model = network.eval()
            self.processor = transformers.AutoImageProcessor.from_pretrained(model)

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self.model.to(device)

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> Tensor:
        """Return the features [b, d] of b images, float32 on the CPU."""
        inputs = self.processor(images=list(images), return_tensors="pt").to(self.model.device)
        return _pooled(getattr(self.model, "get_image_features", self.model)(**inputs))


class Clip(Vision):
    """CLIP (Radford et al. 2021, arXiv 2103.00020), which maps images and texts into one space."""

    def __init__(self, model: str) -> None:
        import transformers

        super().__init__(model)
        if not hasattr(self.model, "get_text_features"):
            raise ConfigError(f"{type(self.model).__name__} in {model} has no text encoder; use a CLIP model")
        with loading(model):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Tensor:
        """Return the features [b, d] of b texts, which are truncated to the model's context length."""
        longest = self.model.config.text_config.max_position_embeddings
        inputs = self.tokenizer(
            list(prompts), return_tensors="pt", padding=True, truncation=True, max_length=longest
        ).to(self.model.device)
        return _pooled(self.model.get_text_features(**inputs))


class Reward:
    """ImageReward (Xu et al. 2023, arXiv 2304.05977), a model of what people prefer, from its own package."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("ImageReward") is None:
            raise ConfigError("its package is not installed; run: pip install image-reward")
        with loading(name):
            self.model: Any = importlib.import_module("ImageReward").load(name, device="cpu")

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self.model.to(device)
        self.model.device = device

    def __call__(self, images: Sequence[Image], prompts: Sequence[str]) -> Tensor:
        """Return the scores [b] of b images, float32 on the CPU; about 0 for an average image."""
        return torch.tensor([self.model.score(p, one) for p, one in zip(prompts, images, strict=True)])


def _pooled(output: Any) -> Tensor:
    if not isinstance(output, Tensor):  # transformers 4 returns a tensor for CLIP
        pooled = output.pooler_output
        output = output.last_hidden_state.mean(dim=1) if pooled is None else pooled
    return output.flatten(start_dim=1).float().cpu()


def loading(what: str) -> contextlib.AbstractContextManager[None]:
    """Turn the various errors of loading a network into a ``ConfigError`` of one line."""
    return errors_as(lambda reason: ConfigError(f"cannot load {what} ({reason})"))


# Mean and standard deviation of the colours of ImageNet, for values in [-1, 1].
_MEAN = (-0.030, -0.088, -0.188)
_STD = (0.458, 0.448, 0.450)


# The layers of AlexNet whose outputs are compared, numbered as in the file of weights, and their numbers of
# channels.
_COMPARED = (1, 4, 7, 9, 11)
_CHANNELS = (64, 192, 384, 256, 256)
_EPSILON = 1e-8  # the published weights were trained with this constant
_WEIGHTS = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"


class Distance(nn.Module):
    """LPIPS (Zhang et al. 2018, arXiv 1801.03924, equation 1) on a network with any weights.

    The features of some layers are scaled to unit length at each position. Their squared differences are
    weighted by channel, averaged over the positions, and summed over the layers.
    """

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
        )
        self.weights = nn.ParameterList(map(torch.ones, _CHANNELS))
        self.register_buffer("mean", torch.tensor(_MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(_STD)[:, None, None])
        self.requires_grad_(False)

    def forward(self, images: Tensor, reference: Tensor) -> Tensor:
        """Return the distances [b] between two batches [b, 3, h, w] with values in [0, 1]."""
        pairs = zip(self._unit_features(images), self._unit_features(reference), strict=True)
        distances = []
        for (x, y), weight in zip(pairs, self.weights, strict=True):
            weighted = (x - y).square() * weight[:, None, None]
            distances.append(weighted.sum(dim=1).mean(dim=(1, 2)))
        return torch.stack(distances).sum(dim=0)

    def _unit_features(self, images: Tensor) -> list[Tensor]:
        x = (2 * images - 1 - self.mean) / self.std
        found = []
        for index, layer in enumerate(self.features):
            x = layer(x)
            if index in _COMPARED:
                length = (x.square().sum(dim=1, keepdim=True) + _EPSILON).sqrt()
                found.append(x / length)
        return found


class Lpips:
    """LPIPS with its published weights on AlexNet, ``"alex"``.

    The weights of the channels come with torchmetrics. Those of AlexNet are downloaded once, into the folder
    of ``torch.hub``.
    """

    def __init__(self, backbone: str = "alex") -> None:
        if backbone != "alex":
            raise ConfigError(f"expected the network alex, got {backbone!r}")
        self.net = Distance()
        _load_trained(self.net.features)
        file = resources.files("torchmetrics") / "functional" / "image" / "lpips_models" / "alex.pth"
        with resources.as_file(file) as path:
            published = torch.load(path, map_location="cpu", weights_only=True)
        for index, weight in enumerate(self.net.weights):
            weight.copy_(published[f"lin{index}.model.1.weight"].flatten())

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self.net.to(device)

    @torch.no_grad()
    def __call__(self, images: Tensor, reference: Tensor) -> Tensor:
        """Return the distances [b] between two batches [b, 3, h, w] with values in [0, 1]."""
        device = self.net.mean.device
        distances: Tensor = self.net(images.to(device), reference.to(device))
        return distances.float().cpu()


def _load_trained(features: nn.Module) -> None:
    try:
        trained = torch.hub.load_state_dict_from_url(
            _WEIGHTS, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
        features.load_state_dict({name: trained[f"features.{name}"] for name in features.state_dict()})
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise ConfigError(
            f"cannot load its weights ({reason_of(error)}); without internet access, save {_WEIGHTS} in "
            f"{folder}"
        ) from error
