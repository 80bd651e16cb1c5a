"""Write docs/command-line.md from the options and texts of the command line, and the rivals of reproduce.md.

python docs/command_line.py
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from tokenmerge_tools.cli.app import app
from tokenmerge_tools.variants.rivals import RIVALS

REPRODUCE = Path(__file__).parent / "reproduce.md"
TABLE = re.compile(r"(<!-- rivals:.*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)
PAGE = Path(__file__).parent / "command-line.md"
COMMANDS = re.compile(r"(<!-- commands:.*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)


def page() -> str:
    """Return the whole page, with the reference of all commands as typer knows them."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="tokenmerge")
    # The page has a title of its own, and says before what the commands are.
    reference = text[text.index("## ") :].replace("\n## ", "\n### ").replace("## ", "### ", 1)
    reference = re.sub(r"\n{2,}- `tokenmerge", "\n- `tokenmerge", reference)
    reference = reference.replace("Examples:\n- ", "Examples:\n\n- ")
    return COMMANDS.sub(lambda found: found[1] + reference.strip() + "\n" + found[2], _written())


def rivals() -> str:
    """Return the page reproduce.md with the table of rivals."""
    rows = [
        "| variant | by | what it does | default, and the settings of `:all` |",
        "|---|---|---|---|",
    ]
    for name, kind in RIVALS.items():
        wrapped = isinstance(kind.apply, functools.partial)
        by = kind.package or ("diffusers" if wrapped else "its formula, in the tools")
        what = (kind.apply.args[2] if wrapped else kind.apply).__doc__.partition("\n")[0].replace("``", "`")
        without = "none" if kind.method is None else "the ratios of `--ratio`"
        setting = without if kind.number is None else f"{kind.number[0]} {kind.number[1]:g}"
        ladder = ", ".join(f"{value:g}" for value in kind.ladder)
        ladder += "".join(f"; `{option}={_plain(value)}`" for option, value in kind.options.items())
        rows.append(f"| `{name}` | {by} | {what} | {setting}{ladder and f'; {ladder}'} |")
    written = REPRODUCE.read_text(encoding="utf-8")
    return TABLE.sub(lambda found: found[1] + "\n".join(rows) + "\n" + found[2], written)


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _written() -> str:
    return PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    REPRODUCE.write_text(rivals(), encoding="utf-8")
