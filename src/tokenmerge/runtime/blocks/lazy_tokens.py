"""Tokens between two blocks of a stack, which others see as ordinary tokens."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Kind = TypeVar("Kind", bound="LazyTokens")


class LazyTokens(Tensor):
    """A tensor ``[b, n, c]`` of ordinary tokens, which are made when somebody reads them."""

    ordinary: Tensor | None  # None until somebody reads them

    # Operations are seen below, in ``__torch_dispatch__``.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def like(cls: type[Kind], ordinary: Tensor, value: Tensor) -> Kind:
        """Make tokens of the shape of ``ordinary``, with the type and device of ``value``."""
        tokens: Kind = Tensor._make_wrapper_subclass(
            cls, ordinary.shape, dtype=value.dtype, device=value.device
        )
        tokens.ordinary = None
        return tokens

    @property
    def was_read(self) -> bool:
        """Whether somebody has read the tokens."""
        return self.ordinary is not None

    def make(self) -> Tensor:
        """Make the ordinary tokens, once."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Return the ordinary tokens."""
        if self.ordinary is None:
            self.ordinary = self.make()
        return self.ordinary

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)


def plain(value: Any) -> Any:
    """Return ordinary tokens for lazy ones, and any other value as it is."""
    return value.read() if isinstance(value, LazyTokens) else value
