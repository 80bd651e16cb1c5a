"""Write the pages of the commands from the texts of the command line, and the rivals of reproduce.md.

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
FOLDER = Path(__file__).parent / "commands"
COMMANDS = re.compile(r"(<!-- commands:.*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the text of a page for each command, and of the page that lists them."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="tokenmerge")
    made, rows = {}, ["| command | what it does |", "|---|---|"]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name = section.partition("`")[2].partition("`")[0].split()[1]
        section = re.sub(r"\n{2,}- `tokenmerge", "\n- `tokenmerge", section)
        section = section.replace("Examples:\n- ", "Examples:\n\n- ").replace("\n### ", "\n## ")
        what = section.split("\n\n")[1].replace("\n", " ")
        made[FOLDER / f"{name}.md"] = f"# {section.strip()}\n"
        rows.append(f"| [`{name}`](commands/{name}.md) | {re.split(r'[:;.]', what)[0]} |")
    table = "\n".join(rows) + "\n"
    made[PAGE] = COMMANDS.sub(lambda found: found[1] + table + found[2], PAGE.read_text(encoding="utf-8"))
    return made


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


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, written in pages().items():
        path.write_text(written, encoding="utf-8")
    REPRODUCE.write_text(rivals(), encoding="utf-8")
