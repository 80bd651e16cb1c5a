"""Imports a library that names another one at its import and does not need it for what is tested."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class whose attributes are names, so that tables of constants can be made of it."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.library:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@functools.cache
def imported_without(name: str, library: str) -> ModuleType:
    """Import a module; where ``library`` does not import, a stand-in takes its place meanwhile.

    The stand-in is gone afterwards, so that no other library takes it for the real one.
    """
    try:
        importlib.import_module(library)
    except (ImportError, RuntimeError):  # RuntimeError: its operators do not fit this torch
        finder = _Finder(library)
        sys.meta_path.insert(0, finder)
        try:
            return importlib.import_module(name)
        finally:
            sys.meta_path.remove(finder)
            for loaded in [m for m in sys.modules if m.partition(".")[0] == library]:
                del sys.modules[loaded]
    return importlib.import_module(name)
