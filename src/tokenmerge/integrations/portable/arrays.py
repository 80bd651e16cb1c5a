"""The array operations that merging needs, and NumPy's version of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

# An array of some library, with ``shape``, ``reshape``, arithmetic, slicing and ``@``.
Array = Any


class Arrays(Protocol):
    """Operations that array libraries spell differently. Indices are int64."""

    def index(self, values: np.ndarray, like: Array) -> Array:
        """Indices computed with NumPy, as an array on the device of ``like``."""

    def count(self, shape: Sequence[int], like: Array) -> Array:
        """Ones of a shape, float32, on the device of ``like``."""

    def take(self, x: Array, index: Array) -> Array:
        """``[k, …]`` rows of ``x`` ``[n, …]`` by one-dimensional ``index`` ``[k]``."""

    def take_along(self, x: Array, index: Array) -> Array:
        """``[b, k]`` elements of each row of ``x`` ``[b, s]`` by ``index`` ``[b, k]``."""

    def put(self, x: Array, index: Array, values: Array) -> Array:
        """``x`` ``[n]`` with ``values`` ``[k]`` at the distinct places ``index`` ``[k]``."""

    def add(self, x: Array, index: Array, values: Array) -> Array:
        """``x`` ``[n, …]`` plus ``values`` ``[k, …]`` at rows ``index`` ``[k]``, which may repeat."""

    def largest(self, x: Array) -> tuple[Array, Array]:
        """Maximum along the last axis, and the index of its first occurrence."""

    def descending(self, x: Array) -> Array:
        """Indices along the last axis from the largest value to the smallest; equal ones stay in order."""

    def length(self, x: Array) -> Array:
        """Euclidean norm along the last axis, which keeps size 1. 0 becomes the smallest normal number."""

    def transpose(self, x: Array) -> Array:
        """The last two axes of ``[b, n, c]`` swapped."""

    def concat(self, parts: Sequence[Array], axis: int) -> Array:
        """Arrays joined along an axis."""

    def repeat(self, x: Array, times: int) -> Array:
        """``[times, …]`` copies of ``x``."""

    def exact(self, x: Array) -> Array:
        """``x`` in float32 if it has half precision, or unchanged."""

    def as_type(self, x: Array, like: Array) -> Array:
        """``x`` with the number type of ``like``."""


class NumpyArrays:
    """:class:`Arrays` for NumPy: the reference that other libraries are compared with."""

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

    def transpose(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(0, 2, 1)

    def concat(self, parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.concatenate(parts, axis=axis)

    def repeat(self, x: np.ndarray, times: int) -> np.ndarray:
        return np.broadcast_to(x, (times, *x.shape))

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.promote_types(x.dtype, np.float32))

    def as_type(self, x: np.ndarray, like: np.ndarray) -> np.ndarray:
        return x.astype(like.dtype)
