"""Kernels of our own, in Triton. They are off unless the environment has ``TOKENMERGE_TRITON=1``.

Triton is imported only then. Where the kernels are not used, PyTorch's own operations compute the same.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

from tokenmerge.ops.arithmetic import is_exporting

ON = os.environ.get("TOKENMERGE_TRITON", "0") not in ("", "0")
if ON:
    try:
        import triton
        import triton.language as tl
        from torch.library import triton_op, wrap_triton
    except ImportError as error:
        ON = False
        warnings.warn(
            f"TOKENMERGE_TRITON={os.environ['TOKENMERGE_TRITON']} asks for kernels in Triton, but importing "
            f"Triton failed ({error}), so PyTorch's own operations run instead; run `pip install triton`, or "
            "unset TOKENMERGE_TRITON",
            stacklevel=2,
        )

# The types of devices that the kernels run on: those of NVIDIA and AMD.
devices = {"cuda"}
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def used(*tensors: Tensor) -> bool:
    """Return whether the kernels compute with these tensors: they have no gradients, and are not exported."""
    return (
        ON
        and all(tensor.device.type in devices and tensor.dtype in _TYPES for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and not is_exporting()
    )


if ON:

    @triton.jit
    def _largest_products(  # type: ignore[no-untyped-def]
        A, B, PLACES, WINDOWS, PRODUCT, NEAREST,
        t, q, w, c, a_image, a_row, a_channel, b_image, b_row, b_channel,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        blocks = tl.cdiv(q, ROWS)
        box = tl.program_id(0) // blocks  # of all images
        image, tile = (box // t).to(tl.int64), (box % t).to(tl.int64)
        rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
        places = tl.load(PLACES + tile * q + rows, mask=rows < q, other=0)
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        which = tl.zeros((ROWS,), tl.int32)
        for start in range(0, w, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            windows = tl.load(WINDOWS + tile * w + columns, mask=columns < w, other=0)
            product = tl.zeros((ROWS, COLUMNS), tl.float32)
            for first in range(0, c, CHANNELS):
                k = first + tl.arange(0, CHANNELS)
                a_at = image * a_image + places[:, None] * a_row + k[None, :] * a_channel
                b_at = image * b_image + windows[None, :] * b_row + k[:, None] * b_channel
                a = tl.load(A + a_at, mask=(rows < q)[:, None] & (k < c)[None, :], other=0.0)
                b = tl.load(B + b_at, mask=(columns < w)[None, :] & (k < c)[:, None], other=0.0)
                product = tl.dot(a, b, product, input_precision="ieee")
            product = tl.where((columns < w)[None, :], product, float("-inf"))
            # Of equal ones the first is taken, as PyTorch does on a CPU.
            largest, at = tl.max(product, 1, return_indices=True)
            which = tl.where(largest > best, start + at, which)
            best = tl.maximum(best, largest)
        out = box.to(tl.int64) * q + rows
        tl.store(PRODUCT + out, best, mask=rows < q)
        tl.store(NEAREST + out, tl.load(WINDOWS + tile * w + which), mask=rows < q)

    @triton_op("tokenmerge::largest_products", mutates_args=())
    def largest_products(
        sources: Tensor, destinations: Tensor, places: Tensor, windows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the largest product of each source with the destinations of its window, and their indices.

        It is one launch, and stores no other products.

        Args:
            sources: ``[b, s, c]``.
            destinations: ``[b, d, c]``.
            places: ``[t, q]`` which q of the sources are compared with each of t windows.
            windows: ``[t, w]`` which w of the destinations are in each window.

        Returns:
            ``[b, t * q]`` each.
        """
        product, nearest = _products_like(sources, destinations, places, windows)
        c, (t, q), w = sources.shape[2], places.shape, windows.shape[1]
        with torch.cuda.device_of(sources):
            wrap_triton(_largest_products)[(len(sources) * t * triton.cdiv(q, 64),)](
                sources, destinations, places.contiguous(), windows.contiguous(), product, nearest,
                t, q, w, c, *sources.stride(), *destinations.stride(), ROWS=64, COLUMNS=64, CHANNELS=32,
            )  # fmt: skip
        return product, nearest

    @largest_products.register_fake
    def _products_like(
        sources: Tensor, destinations: Tensor, places: Tensor, windows: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = len(sources), places.numel()
        return sources.new_empty(shape), places.new_empty(shape)

    @triton.jit
    def _add_rows(  # type: ignore[no-untyped-def]
        X, Y, INVERSE, OUT,
        rows, n, c, x_image, x_row, x_channel, y_row, y_channel,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        k = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        merged = tl.load(INVERSE + row, mask=row < rows, other=0)[:, None]
        inside = (row < rows)[:, None] & (k < c)
        x_at = (row // n * x_image + row % n * x_row)[:, None] + k * x_channel
        x = tl.load(X + x_at, mask=inside)
        y = tl.load(Y + merged * y_row + k * y_channel, mask=inside)
        tl.store(OUT + row[:, None] * c + k, x + y, mask=inside)

    @triton_op("tokenmerge::add_rows", mutates_args=())
    def add_rows(x: Tensor, y: Tensor, inverse: Tensor) -> Tensor:
        """Return ``x + y.flatten(0, 1)[inverse]``, in one launch.

        Args:
            x: ``[b, n, c]``.
            y: ``[b, m, c]``.
            inverse: ``[b, n]`` row of y for each token of x, 0 … b · m − 1.
        """
        out, (b, n, c), rows = _like_x(x, y, inverse), x.shape, y.reshape(-1, y.shape[2])
        with torch.cuda.device_of(x):
            wrap_triton(_add_rows)[(triton.cdiv(b * n, 16), triton.cdiv(c, 128))](
                x, rows, inverse.contiguous(), out,
                b * n, n, c, *x.stride(), *rows.stride(), ROWS=16, CHANNELS=128,
            )  # fmt: skip
        return out

    @add_rows.register_fake
    def _like_x(x: Tensor, y: Tensor, inverse: Tensor) -> Tensor:
        return x.new_empty(x.shape)
