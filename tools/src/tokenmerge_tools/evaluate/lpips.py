"""LPIPS, the learned perceptual distance between pictures, with backbones in plain PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError, reason_of

# Mean and standard deviation of the colours of ImageNet, for values in [-1, 1].
_MEAN, _STD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class _Fire(nn.Module):
    """A module of SqueezeNet: fewer channels, then convolutions of two sizes side by side."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x), self.expand3x3(x)], dim=1).relu()


def _alexnet() -> list[nn.Module]:
    return [
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
    ]


def _vgg16() -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers[:-1]


def _squeezenet() -> list[nn.Module]:
    return [
        *(nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(64, 16, 64), _Fire(128, 16, 64), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(128, 32, 128), _Fire(256, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(256, 48, 192), _Fire(384, 48, 192), _Fire(384, 64, 256), _Fire(512, 64, 256)),
    ]


# Networks trained on ImageNet: the convolutional part with the layers of torchvision's file of weights, the
# layers whose outputs are compared, their numbers of channels, and the file.
_BACKBONES: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], tuple[int, ...], str]] = {
    "alex": (_alexnet, (1, 4, 7, 9, 11), (64, 192, 384, 256, 256), "alexnet-owt-7be5be79.pth"),
    "vgg": (_vgg16, (3, 8, 15, 22, 29), (64, 128, 256, 512, 512), "vgg16-397923af.pth"),
    "squeeze": (
        _squeezenet,
        (1, 4, 7, 9, 10, 11, 12),
        (64, 128, 256, 384, 384, 512, 512),
        "squeezenet1_1-b8a52dc0.pth",
    ),
}


class Distance(nn.Module):
    """LPIPS (Zhang et al. 2018, arXiv 1801.03924, equation 1) on a network with any weights.

    The features of some layers are scaled to unit length at each position. Their squared differences are
    weighted by channel, averaged over the positions, and summed over the layers.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        build, self.compared, channels, _ = _BACKBONES[name]
        self.features = nn.Sequential(*build())
        self.weights = nn.ParameterList(map(torch.ones, channels))
        self.register_buffer("mean", torch.tensor(_MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(_STD)[:, None, None])
        self.requires_grad_(False)

    def forward(self, images: Tensor, reference: Tensor) -> Tensor:
        """Return the distances [b] between two batches [b, 3, h, w] with values in [0, 1]."""
        pairs = zip(self._unit_features(images), self._unit_features(reference), strict=True)
        distances = [
            ((x - y).square() * weight[:, None, None]).sum(dim=1).mean(dim=(1, 2))
            for (x, y), weight in zip(pairs, self.weights, strict=True)
        ]
        return torch.stack(distances).sum(dim=0)

    def _unit_features(self, images: Tensor) -> list[Tensor]:
        x, found = (2 * images - 1 - self.mean) / self.std, []
        for index, layer in enumerate(self.features):
            x = layer(x)
            if index in self.compared:
                # The published weights were trained with this constant.
                found.append(x / (x.square().sum(dim=1, keepdim=True) + 1e-8).sqrt())
        return found


class Lpips:
    """LPIPS with its published weights, on the backbone ``"alex"``, ``"vgg"`` or ``"squeeze"``.

    The weights of the channels come with torchmetrics. Those of the backbone are downloaded once, into the
    folder of ``torch.hub``.
    """

    def __init__(self, backbone: str) -> None:
        if backbone not in _BACKBONES:
            raise ConfigError(f"expected one of the networks {', '.join(_BACKBONES)}, got {backbone!r}")
        self.net = Distance(backbone)
        _load_trained(self.net.features, f"https://download.pytorch.org/models/{_BACKBONES[backbone][3]}")
        file = resources.files("torchmetrics") / "functional" / "image" / "lpips_models" / f"{backbone}.pth"
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


def _load_trained(features: nn.Module, address: str) -> None:
    try:
        trained = torch.hub.load_state_dict_from_url(
            address, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
        features.load_state_dict({name: trained[f"features.{name}"] for name in features.state_dict()})
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise ConfigError(
            f"cannot load its weights ({reason_of(error)}); without internet access, save {address} in "
            f"{folder}"
        ) from error
