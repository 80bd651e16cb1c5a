"""The array operations that merging needs, on Paddle's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from paddle import Tensor

_HALF = (paddle.float16, paddle.bfloat16)


class PaddleArrays:
    """:class:`~tokenmerge.integrations.portable.arrays.Arrays` for Paddle.

    Gradients flow through everything but indices.
    """

    def index(self, values: np.ndarray, like: Tensor) -> Tensor:
        return paddle.to_tensor(values, dtype="int64", place=like.place)

    def count(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return paddle.ones(shape, dtype="float32")

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        return paddle.gather(x, index, axis=0)

    def take_along(self, x: Tensor, index: Tensor) -> Tensor:
        return paddle.take_along_axis(x, index, axis=1)

    def put(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return paddle.scatter(x, index, values, overwrite=True)

    def add(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return paddle.index_add(x, index, 0, values)

    def largest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return paddle.max(x, axis=-1), paddle.argmax(x, axis=-1)

    def descending(self, x: Tensor) -> Tensor:
        return paddle.argsort(x, axis=-1, descending=True, stable=True)

    def length(self, x: Tensor) -> Tensor:
        smallest = float(np.finfo(np.float16 if x.dtype == paddle.float16 else np.float32).tiny)
        squares = self.exact(x)
        # Several times as fast on a CPU as paddle.linalg.norm.
        length = paddle.sqrt(paddle.sum(squares * squares, axis=-1, keepdim=True))
        return paddle.clip(length, min=smallest).cast(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return paddle.transpose(x, [0, 2, 1])

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        return paddle.concat(list(parts), axis=axis)

    def repeat(self, x: Tensor, times: int) -> Tensor:
        return paddle.expand(x.unsqueeze(0), [times, *x.shape])

    def exact(self, x: Tensor) -> Tensor:
        return x.cast("float32") if x.dtype in _HALF else x

    def as_type(self, x: Tensor, like: Tensor) -> Tensor:
        return x if x.dtype == like.dtype else x.cast(like.dtype)
