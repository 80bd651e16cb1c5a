"""AudioLDM 2: a UNet on spectrograms (rows: time, columns: frequency) with two text inputs."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host
from tokenmerge.models.placement import blank
from tokenmerge.models.unet_stages import describe_stages

CLASSES = ("AudioLDM2UNet2DConditionModel",)


def describe(root: Any) -> Host:
    """Find the blocks."""
    return describe_stages(root, _example)


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, zeros = root.config, blank(root, batch)
    arguments = {"sample": zeros(config.in_channels, height, width), "encoder_hidden_states": None}
    # Each layer has several transformers. The first two may attend to the first text, the others to the
    # second; a width of None means that a transformer attends to the spectrogram only.
    widths = config.cross_attention_dim
    of_level = widths[0] if isinstance(widths, list | tuple) else widths
    in_turn = of_level if isinstance(of_level, list | tuple) else (of_level,)
    texts = {"encoder_hidden_states": (8, in_turn[:2]), "encoder_hidden_states_1": (77, in_turn[2:])}
    for name, (words, of_transformers) in texts.items():
        if found := [text for text in of_transformers if text is not None]:
            arguments[name] = zeros(words, found[0])
    return arguments
