"""Trained networks that compute features of pictures and texts."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmerge.errors import ConfigError, reason_of

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
            self.model = transformers.AutoModel.from_pretrained(model, config=config).eval()
            self.processor = transformers.AutoImageProcessor.from_pretrained(model)

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self.model.to(device)

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Image]) -> Tensor:
        """Return the features [b, d] of b pictures, float32 on the CPU."""
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
    """ImageReward (Xu et al. 2023, arXiv 2304.05977), by its own package: what people would prefer."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("ImageReward") is None:
            raise ConfigError("its package is not installed; run: pip install image-reward")
        with loading(name):
            self.model: Any = importlib.import_module("ImageReward").load(name, device="cpu")

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self.model.to(device)
        self.model.device = device

    def __call__(self, pictures: Sequence[Image], prompts: Sequence[str]) -> Tensor:
        """Return the scores [b] of b pictures, float32 on the CPU; about 0 for an average picture."""
        return torch.tensor([self.model.score(p, one) for p, one in zip(prompts, pictures, strict=True)])


def _pooled(output: Any) -> Tensor:
    if not isinstance(output, Tensor):  # transformers 4 returns a tensor for CLIP
        pooled = output.pooler_output
        output = output.last_hidden_state.mean(dim=1) if pooled is None else pooled
    return output.flatten(start_dim=1).float().cpu()


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn the various errors of loading a network into a ``ConfigError`` of one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"cannot load {what} ({reason_of(error)})") from error
