"""A fingerprint of the weights of a model, by which it is recognised again."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLES = 16  # numbers of each tensor


def fingerprint(model: nn.Module) -> str | None:
    """Return a fingerprint of the weights, or None if some of them are not in memory.

    It is a hash of the names and the shapes of all parameters, and of some numbers of each. They are rounded
    to bfloat16, so that a model in that type has the fingerprint of the same one in float32. Reading them
    waits for the device once.
    """
    names = []
    samples = []
    for name, tensor in model.named_parameters():
        if tensor.is_meta or type(tensor.data) is not torch.Tensor:
            return None
        names.append(f"{name} {tuple(tensor.shape)}")
        values = tensor.detach().reshape(-1)
        chosen = values[:: max(1, values.numel() // _SAMPLES)][:_SAMPLES]
        samples.append(chosen.to(torch.bfloat16))
    if not samples:
        return None
    told = hashlib.sha256("\n".join(names).encode())
    for device in dict.fromkeys(sample.device for sample in samples):
        read = torch.cat([sample for sample in samples if sample.device == device]).cpu()
        told.update(read.view(torch.int16).numpy().tobytes())
    return told.hexdigest()[:16]
