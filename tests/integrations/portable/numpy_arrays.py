"""The reference that Paddle is compared with, and that PyTorch is compared with where Paddle is missing.

The functions of Paddle that ``tokenmerge.integrations.portable`` calls, on arrays of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy import argmax, clip, max, ones, sqrt, take_along_axis  # noqa: F401

float16, bfloat16 = np.dtype("float16"), object()  # NumPy has no bfloat16


def to_tensor(values: np.ndarray, dtype: str, place: None) -> np.ndarray:
    return np.asarray(values, dtype=dtype)


def gather(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    return x[index]


def scatter(x: np.ndarray, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[index] = values
    return x


def index_add(x: np.ndarray, index: np.ndarray, axis: int, values: np.ndarray) -> np.ndarray:
    assert axis == 0
    x = x.copy()
    np.add.at(x, index, values)
    return x


def argsort(x: np.ndarray, axis: int, descending: bool, stable: bool) -> np.ndarray:
    assert descending
    assert stable
    return np.argsort(-x, axis=axis, kind="stable")


def sum(x: np.ndarray, axis: int, keepdim: bool) -> np.ndarray:
    return x.sum(axis=axis, keepdims=keepdim)


def concat(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    return np.concatenate(parts, axis=axis)


def cast(x: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    return x.astype(dtype)
