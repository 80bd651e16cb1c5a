"""The array operations that merging needs, on Paddle's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from paddle import Tensor

_HALF = (paddle.float16, paddle.bfloat16)


class PaddleArrays:
    """The operations that ``integrations.portable`` needs. Gradients flow through everything but indices."""

    def index(self, values: np.ndarray, like: Tensor) -> Tensor:
        """Return indices computed with NumPy as int64, on the device of ``like``."""
        return paddle.to_tensor(values, dtype="int64", place=like.place)

    def count(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return ones of a shape, float32, on the device of ``like``."""
        return paddle.ones(shape, dtype="float32")

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """Select ``[k, …]`` rows of ``x`` ``[n, …]`` by ``index`` ``[k]``."""
        return paddle.gather(x, index, axis=0)

    def take_along(self, x: Tensor, index: Tensor) -> Tensor:
        """Select ``[b, k]`` elements of each row of ``x`` ``[b, s]`` by ``index`` ``[b, k]``."""
        return paddle.take_along_axis(x, index, axis=1)

    def put(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """Put ``values`` ``[k]`` into a copy of ``x`` ``[n]`` at the distinct places ``index``."""
        return paddle.scatter(x, index, values, overwrite=True)

    def add(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """Add ``values`` ``[k, …]`` to a copy of ``x`` at rows ``index`` ``[k]``, which may repeat."""
        return paddle.index_add(x, index, 0, values)

    def largest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum along the last axis, and the index of its first occurrence."""
        return paddle.max(x, axis=-1), paddle.argmax(x, axis=-1)

    def descending(self, x: Tensor) -> Tensor:
        """Return the indices of a stable sort along the last axis, the largest value first."""
        return paddle.argsort(x, axis=-1, descending=True, stable=True)

    def length(self, x: Tensor) -> Tensor:
        """Return the Euclidean norm along the last axis, of size 1. 0 becomes the smallest normal number."""
        smallest = float(np.finfo(np.float16 if x.dtype == paddle.float16 else np.float32).tiny)
        squares = self.exact(x)
        # Several times as fast on a CPU as paddle.linalg.norm.
        length = paddle.sqrt(paddle.sum(squares * squares, axis=-1, keepdim=True))
        return paddle.clip(length, min=smallest).cast(x.dtype)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Join arrays along an axis."""
        return paddle.concat(list(parts), axis=axis)

    def exact(self, x: Tensor) -> Tensor:
        """Return ``x`` in float32 if it has half precision, or unchanged."""
        return x.cast("float32") if x.dtype in _HALF else x

    def as_type(self, x: Tensor, like: Tensor) -> Tensor:
        """Return ``x`` with the number type of ``like``."""
        return x if x.dtype == like.dtype else x.cast(like.dtype)
