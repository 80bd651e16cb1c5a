"""The optimiser: Muon for weight matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def orthogonalize(update: Tensor) -> Tensor:
    """Bring all singular values of a matrix [m, n] near 1: five Newton–Schulz steps (Jordan et al., 2024)."""
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised update; a convolution counts as the matrix [out, in · kernel].

    The update is scaled to the size AdamW's usually has, so that both share one learning rate.
    """

    def __init__(self, params: Iterable[nn.Parameter], momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                nesterov = weight.grad.lerp(state["momentum"], group["momentum"])
                update = orthogonalize(nesterov.flatten(1))
                scale = 0.2 * max(update.shape) ** 0.5
                weight.add_(update.view_as(weight), alpha=-group["lr"] * scale)


# Layers whose rows are looked up or belong to single pixels: nothing to orthogonalise between them.
NOT_MATRICES = ("embedding", "conv_in", "conv_out")


def build_optimisers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Give every parameter of a model to one of the two optimisers."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        is_matrix = weight.ndim > 1 and not any(layer in name for layer in NOT_MATRICES)
        (matrices if is_matrix else others).append(weight)
    return [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.99), weight_decay=0.0)]
