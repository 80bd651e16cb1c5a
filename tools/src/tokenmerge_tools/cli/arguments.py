"""Makes the options of a command from the fields of a class of options."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from tokenmerge_tools.cli.merging import merging
from tokenmerge_tools.pipelines.settings import parse_size

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


ABOUT = ("model", "size", "steps", "scheduler", "guidance")  # the options that settings in a file depend on


def takes(options: type | None = None, all_optional: bool = False) -> Callable[..., Callable[..., None]]:
    """Give a command the options that the fields of a class declare, and the options for token merging.

    The command's argument ``given`` stands for the fields that are annotated with an option. It receives a
    dictionary of the values that are not None, by name. A tuple is an option that may be repeated, and a size
    is read from its text. An argument or a field ``merging`` stands for the options of
    :func:`tokenmerge_tools.cli.merging.merging`.

    With ``all_optional``, only options that the user gave have a value, and the help names the defaults.
    """
    fields = {} if options is None else {one.name: one for one in _parameters(options, all_optional)}
    of_merging = dict(inspect.signature(merging, eval_str=True).parameters)
    del of_merging["about"]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        declared = inspect.signature(command, eval_str=True).parameters
        parameters: list[inspect.Parameter] = []
        for name, parameter in declared.items():
            for one in fields.values() if name == "given" else (parameter,):
                parameters += of_merging.values() if one.name == "merging" else (one,)
        merges = "merging" in fields or "merging" in declared

        @functools.wraps(command)
        def run(**values: Any) -> None:
            if merges:
                method = {name: values.pop(name) for name in of_merging}
                values["merging"] = merging(**method, about={name: values.get(name) for name in ABOUT})
            if fields:
                given = {name: values.pop(name) for name in fields}
                values["given"] = {
                    name: _read(name, value) for name, value in given.items() if value not in (None, [])
                }
            command(**values)

        # typer reads the signature and the annotations.
        keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in keywords}
        return run

    return decorate


def _parameters(options: type, all_optional: bool) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field with an option, and for ``merging``."""
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        base, *declared = get_args(hints[field.name]) or (hints[field.name],)
        if field.name == "merging":
            yield inspect.Parameter("merging", inspect.Parameter.KEYWORD_ONLY)
        if get_origin(hints[field.name]) is not Annotated:
            continue
        default = field.default
        (found,) = declared
        many = get_origin(base) is tuple
        if many:
            base = list[get_args(base)[0]] | None  # type: ignore[misc]
        elif field.name == "size":
            base = str | None
        elif all_optional:
            base = base | None
        if many or all_optional:
            found = copy.copy(found)
            found.help = _with_default(found.help, default)
            default = None
        if default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[base, found]
        )


def _with_default(text: str, default: Any) -> str:
    if isinstance(default, tuple):
        text = f"{text} May be repeated."
        values = default
    elif default is None:
        values = ()
    else:
        values = (default,)
    return f"{text} Default: {', '.join(map(str, values))}." if values else text


def _read(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return parse_size(value) if name == "size" else value
