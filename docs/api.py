"""Write the list of public names and signatures at the end of docs/api.md: python docs/api.py.

The names are those that the page documents. A test compares the list with the code, so a change of a public name or
of an argument shows in the page.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "api.md"
_LIST = re.compile(r"(<!-- signatures: [^\n]*-->\n```text\n).*?(```\n<!-- end -->)", flags=re.DOTALL)
# A line of a list of documented objects, as docs/conf.py reads it.
_OBJECT = re.compile(
    r"^- (function|class|module) `([\w.]+)`( and (?:its members|all its members|what is in it))?(?:: (.*))?$",
    re.MULTILINE,
)


def documented(page: str) -> dict[str, bool]:
    """Return the full names of all functions and classes that the page documents, in its order.

    The value says whether it documents the methods and properties of a class too.
    """
    names: dict[str, bool] = {}
    for kind, name, whole, listed in _OBJECT.findall(page):
        if kind != "module":
            names[name] = bool(whole)
        elif whole or listed:
            own = re.findall(r"`(\w+)`", listed) or _own_names(importlib.import_module(name))
            names |= {f"{name}.{each}": False for each in own}
    return names


def _own_names(module: Any) -> list[str]:
    own = {
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    }
    return list(getattr(module, "__all__", sorted(name for name in own if not name.startswith("_"))))


def found(name: str) -> Any:
    """Return the object with a full name."""
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def signature(value: Any) -> str:
    """Return the arguments of a function as a call takes them, without their types."""
    own = inspect.signature(value)
    plain = [
        one.replace(annotation=inspect.Parameter.empty, default=_default(one.default))
        for one in own.parameters.values()
        if one.name not in ("self", "cls")
    ]
    text = str(own.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return text.replace("Ellipsis", "...")


def _default(value: Any) -> Any:
    """Return a default whose text has no address of memory: ``...`` for a factory of a dataclass."""
    return ... if " at 0x" in repr(value) or "factory" in repr(value) else value


def lines(name: str, with_members: bool) -> Iterator[str]:
    """Yield a line for a function; for a class, one more for each method and property that the page documents.

    Users make settings themselves, so these have their arguments. Of a result, its fields are listed.
    """
    value = found(name)
    if not inspect.isclass(value):
        yield f"{name}{signature(value)}"
        return
    if issubclass(value, Exception):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
        return
    settings = value.__module__.startswith(("tokenmerge.config", "tokenmerge.vit.config"))
    yield f"{name}{signature(value) if settings else ''}"
    if dataclasses.is_dataclass(value) and not settings:
        yield from (f"    .{field.name}" for field in dataclasses.fields(value) if field.name[0] != "_")
    for own, member in sorted(_members(value).items() if with_members else ()):
        if isinstance(member, property):
            yield f"    .{own}"
        elif callable(member) or isinstance(member, (classmethod, staticmethod)):
            yield f"    .{own}{signature(getattr(value, own))}"


def _members(value: type) -> dict[str, Any]:
    of_bases = [vars(base) for base in reversed(value.__mro__) if base.__module__.startswith("tokenmerge")]
    return {name: member for own in of_bases for name, member in own.items() if not name.startswith("_")}


def written(page: str) -> str:
    """Return the page with the present list."""
    text = "".join(f"{line}\n" for own in documented(page).items() for line in lines(*own))
    result, count = _LIST.subn(lambda match: match[1] + text + match[2], page)
    if count != 1:
        raise ValueError(f"{PAGE.name}: expected one list of signatures, got {count}")
    return result


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
