"""A device for tests on machines without one. Its tensors are held and computed on the CPU.

While a :class:`FakeDevice` is entered, PyTorch has the device ``DEVICE``. Tensors on it can be made, copied
and computed with as on a real one, and an operation on tensors of two devices fails.
:attr:`FakeDevice.waits` counts what a real device would be waited for.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import tokenmerge

DEVICE = torch.device("privateuseone:0")
AVAILABLE = hasattr(getattr(torch._C, "_acc", None), "register_python_privateuseone_device_guard")
OURS = str(Path(tokenmerge.__file__).parent)
# Operations that hand values to Python, or whose result has a shape that follows from values.
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount"}


class OnDevice(Tensor):
    """A tensor on the device, and the one on the CPU that holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        facts = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.size(), **facts, device=DEVICE)
        made.held = held
        return made

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __repr__(self) -> str:
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Module:
    """The functions that PyTorch expects of the module of a device type."""

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = manual_seed_all = staticmethod(lambda *_: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)


class FakeDevice(TorchDispatchMode):
    """The device, while it is entered.

    Attributes:
        waits: how many times the device was waited for, by the line of the library that asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> FakeDevice:
        from torch.utils.backend_registration import _DummyDeviceGuard

        if not hasattr(_Module, "guard"):
            _Module.guard = _DummyDeviceGuard()
            torch._C._acc.register_python_privateuseone_device_guard(_Module.guard)
        torch.privateuseone = sys.modules["torch.privateuseone"] = _Module
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(…, device=DEVICE) comes here
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)
        del torch.privateuseone, sys.modules["torch.privateuseone"]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(function, args, kwargs):
            frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
            if frames[-2].filename.startswith(OURS):  # the last one is this
                name = function._schema.name.removeprefix("aten::")
                self.waits[f"{name} at {frames[-2].filename}:{frames[-2].lineno}"] += 1
        return _run(function, args, kwargs)


def to_device(model: nn.Module) -> nn.Module:
    """Move the weights of a model to the device."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(OnDevice(weight.detach()), requires_grad=False)
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else OnDevice(value)
    return model


def _waits(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation copies between the device and the CPU, or needs values of the device."""
    name = function._schema.name.removeprefix("aten::")
    there = [isinstance(one, OnDevice) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if name == "_to_copy":
        target = kwargs.get("device")
        return target is not None and (torch.device(target).type == DEVICE.type) is not there[0]
    if name == "copy_" or name.startswith("index"):  # a mask, or places that are on the CPU
        masks = name == "index" and any(one is not None and one.dtype == torch.bool for one in args[1])
        return any(there) and (masks or not all(there))
    return name in WAITING and any(there)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU.

    Raises:
        RuntimeError: its tensors are on two devices, and those on the CPU are more than single numbers.
    """
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    there = any(isinstance(one, OnDevice) for one in given)
    name = function._schema.name.removeprefix("aten::")
    apart = any(one.ndim and not isinstance(one, OnDevice) for one in given)
    if there and apart and name not in ("copy_", "index", "index_put_"):
        raise RuntimeError(f"{name}: expected all tensors on one device")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(_held, (args, kwargs))
    result = function(*args, **kwargs)
    return tree_map(lambda x: OnDevice(x) if isinstance(x, Tensor) else x, result) if there else result


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value
