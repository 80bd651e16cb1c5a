r"""What proportional attention costs, with a mask and with the two ways for kernels that take no mask.

`plain` is attention without sizes. `mask` adds their logarithms to the logits. `columns` makes heads longer
by 1 to 8 channels, and `values` calls the kernel twice (`attend_by_columns` and `attend_by_values` in
`tokenmerge.ops`). Rounds are interleaved. Each line shows the median of the rounds relative to plain
attention, and the largest difference from attention in float64 over some of the queries.

    python benchmarks/proportional.py --dtype float32 --out benchmarks/proportional_cpu.jsonl
    python benchmarks/proportional.py --dtype bfloat16 --out benchmarks/proportional_cpu.jsonl

On a GPU, for each back-end of diffusers that is installed; native is PyTorch's own choice:

    python benchmarks/proportional.py --device cuda --dtype bfloat16 --tokens 2048 4096 8192 16384 \
        --backend native _native_flash _native_cudnn _native_efficient flash _flash_3 sage xformers \
        --rounds 50 --out benchmarks/proportional_gpu.jsonl
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import turns
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from tokenmerge.ops.sized_attention import attend_by_columns, attend_by_values, head_size_with_columns

# Channels per head, and number of heads in models with such heads: SD 1.5, SDXL and SD3, FLUX.
HEADS = {40: 8, 64: 24, 128: 24}
CHECKED = 64  # queries whose exact result is computed


def variants(
    kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, sizes: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to compute attention. Not every kernel has all of them."""
    tensors = (query, key, value)
    mask = sizes.log().to(query.dtype)[:, None, None, :]
    return {
        "plain": functools.partial(kernel, *tensors),
        "mask": functools.partial(kernel, *tensors, attn_mask=mask),
        "columns": functools.partial(attend_by_columns, kernel, *tensors, sizes),
        "values": functools.partial(attend_by_values, kernel, *tensors, sizes),
    }


def exact(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor) -> Tensor:
    """Return the result for the first queries, in float64."""
    query, key, value = (t.double().transpose(1, 2) for t in (query[:, :CHECKED], key, value))
    weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) * sizes.double()[:, None, None]
    return (weights @ value / weights.sum(-1, keepdim=True)).transpose(1, 2)


@torch.inference_mode()
def measure(backend: str, d: int, tokens: int, options: argparse.Namespace) -> None:
    draw = torch.Generator().manual_seed(0)
    like = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    query, key, value = (
        torch.randn(options.batch, tokens, HEADS[d], d, generator=draw).to(**like) for _ in range(3)
    )
    sizes = torch.randint(1, 5, (options.batch, tokens), generator=draw).float().to(options.device)
    kernel = _AttentionBackendRegistry._backends[AttentionBackendName(backend)]
    expected = exact(query, key, value, sizes)
    calls = {}
    errors = {}
    for name, call in variants(kernel, query, key, value, sizes).items():
        try:
            result = call()
        except (ValueError, RuntimeError) as error:
            print(f"{backend}, {d} channels, {name}: {str(error).splitlines()[0]}")
            continue
        if name != "plain":
            errors[name] = (result[:, :CHECKED] - expected).abs().max().item()
        calls[name] = functools.partial(turns.seconds, call, options.device)
    what = f"{backend}, {HEADS[d]} heads of {d} channels, {tokens} tokens"
    times = turns.in_turns(calls, options.rounds, what)
    conditions = {"backend": backend, "heads": HEADS[d], "channels": d, "tokens": tokens}
    turns.record(options, times, **conditions, batch=options.batch, error=errors)
    print(f"\n{what}, batch {options.batch}, {options.dtype}, {options.device}")
    print(f"{'variant':<10}{'median ms':>11}{'over plain':>12}{'quartiles':>18}{'error':>10}")
    for name, values in times.items():
        over = [100 * (a / b - 1) for a, b in zip(values, times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(over, n=4)
        error = f"{errors[name]:.1e}" if name in errors else ""
        print(
            f"{name:<10}{1000 * statistics.median(values):>11.2f}{middle:>10.1f} %"
            f"{f'{low:.1f} to {high:.1f} %':>18}{error:>10}"
        )
    print(f"columns run with {head_size_with_columns(d)} channels")


def main() -> None:
    parser = turns.parser(__doc__, rounds=15)
    parser.add_argument("--head-size", type=int, nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="default: 2048")
    parser.add_argument("--batch", type=int, default=2, help="default: 2, as with guidance")
    parser.add_argument("--backend", nargs="+", default=["native"], help="of diffusers (default: native)")
    options = parser.parse_args()
    for backend in options.backend:
        for d in options.head_size:
            for tokens in options.tokens:
                measure(backend, d, tokens, options)


if __name__ == "__main__":
    main()
