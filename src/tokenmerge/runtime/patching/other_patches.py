"""Patches of other packages that swap the classes of blocks, as tomesd does: two of them would both merge."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import modules_in
from tokenmerge.runtime.memory.state import ModelState
from tokenmerge.runtime.patching.swap import Derived

_PARENT = "_parent"  # the attribute in which such a class keeps the class that it took the place of
_REMOVED_BY = {"tomesd": "tomesd.remove_patch(pipe)", "hidiffusion": "hidiffusion.remove_hidiffusion(pipe)"}


def refuse_other_patches(root: nn.Module) -> None:
    """Refuse a model in which another package has swapped the class of a block."""
    for module in modules_in(root):
        swapped: Any = next((cls for cls in type(module).__mro__ if _PARENT in vars(cls)), None)
        if swapped is None or getattr(swapped, _PARENT) not in swapped.__mro__[1:]:
            continue
        path = next(path for path, candidate in root.named_modules() if candidate is module)
        package = swapped.__module__.partition(".")[0]
        name = path or type(root).__name__
        how = _REMOVED_BY.get(package, f"set the class of each such block to its {_PARENT}")
        raise UnsupportedModelError(
            f"{name}: {swapped.__module__} has put its {swapped.__name__} in the place "
            f"of this block, and both would change its tokens; take it off first: {how}"
        )


def refuse_later_patches(state: ModelState, root: nn.Module) -> None:
    """Refuse a patched model in which another package has swapped the class of a block since its last call.

    Looking at all modules takes milliseconds. So it is done only after a class was derived from one of those
    that ``swap`` makes.
    """
    number = Derived.number
    if state.derived != number:
        refuse_other_patches(root)
        state.derived = number
