"""The kernels as Triton and torch.compile translate them. No GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenmerge.ops import add_unmerged, kernels, make_plan, most_similar

CARDS = (GPUTarget("cuda", 75, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))


def assembly(kernel: object, target: GPUTarget, pointers: dict[str, str], **sizes: int) -> str:
    """The kernel in the language of a card."""
    types = {name: "constexpr" if name in sizes else pointers.get(name, "i32") for name in kernel.arg_names}
    made = triton.compile(ASTSource(fn=kernel, signature=types, constexprs=sizes), target=target)
    return made.asm["ptx" if target.backend == "cuda" else "amdgcn"]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.arch))
def test_matching_is_compiled_for_cards_and_multiplies_in_float32(card):
    pointers = dict.fromkeys(("A", "B", "PRODUCT"), "*fp32")
    pointers |= dict.fromkeys(("PLACES", "WINDOWS", "NEAREST"), "*i64")
    text = assembly(kernels._largest_products, card, pointers, ROWS=64, COLUMNS=64, CHANNELS=32)
    assert "tf32" not in text
    assert "xf32" not in text


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.arch))
def test_unmerging_is_compiled_for_cards(card, dtype):
    pointers = dict.fromkeys(("X", "Y", "OUT"), f"*{dtype}") | {"INVERSE": "*i64"}
    assert assembly(kernels._add_rows, card, pointers, ROWS=16, CHANNELS=128)


def test_torch_compile_puts_the_kernels_into_its_one_graph(monkeypatch):
    monkeypatch.setattr(kernels, "devices", {"meta"})
    card = SimpleNamespace(get_current_target=lambda: CARDS[1])
    triton.runtime.driver.set_active(card)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def merge_all(x: Tensor, y: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        similarity, nearest = most_similar(x, src, dst)
        plan = make_plan(src, dst, similarity.argsort(dim=-1), nearest, 6)
        return add_unmerged(plan, x, y)

    compiled = torch.compile(merge_all, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    src, dst = (torch.zeros(n, dtype=torch.int64, device="meta") for n in (8, 4))
    with torch.no_grad():
        shape = compiled(*(torch.empty(2, n, 5, device="meta") for n in (12, 6)), src, dst).shape
    assert shape == (2, 12, 5)
    launched = [
        node.kwargs
        for node in graphs[0].graph.nodes
        if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional
    ]
    names = [kernel_side_table.get_kernel(one["kernel_idx"]).fn.__name__ for one in launched]
    assert names == ["_largest_products", "_add_rows"]
    # Only what a kernel writes to may be a tensor of its own.
    assert [set(one["tensors_to_clone"]) for one in launched] == [{"PRODUCT", "NEAREST"}, {"OUT"}]


def test_triton_is_imported_only_if_it_is_asked_for():
    script = "import sys, torch, tokenmerge.ops; print('triton' in sys.modules, tokenmerge.ops.kernels.ON)"
    env = {name: value for name, value in os.environ.items() if name != "TOKENMERGE_TRITON"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
