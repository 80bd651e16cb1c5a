"""The reference that Paddle is compared with, and that PyTorch is compared with where Paddle is missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class NumpyArrays:
    """The operations of ``tokenmerge.integrations.paddle.arrays.PaddleArrays`` on arrays of NumPy."""

    def index(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        return values

    def count(self, shape: Sequence[int], like: np.ndarray) -> np.ndarray:
        return np.ones(shape, dtype=np.float32)

    def take(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        return x[index]

    def take_along(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x, index, axis=1)

    def put(self, x: np.ndarray, index: np.ndarray, values: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[index] = values
        return x

    def add(self, x: np.ndarray, index: np.ndarray, values: np.ndarray) -> np.ndarray:
        x = x.copy()
        np.add.at(x, index, values)
        return x

    def largest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x.max(axis=-1), x.argmax(axis=-1)

    def descending(self, x: np.ndarray) -> np.ndarray:
        return np.argsort(-x, axis=-1, kind="stable")

    def length(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(np.sqrt((x * x).sum(axis=-1, keepdims=True)), np.finfo(x.dtype).tiny)

    def concat(self, parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.concatenate(parts, axis=axis)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.promote_types(x.dtype, np.float32))

    def as_type(self, x: np.ndarray, like: np.ndarray) -> np.ndarray:
        return x.astype(like.dtype)
