"""Write docs/command-line.md from the options and texts of the command line.

python docs/command_line.py
"""

from __future__ import annotations

import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from tokenmerge_tools.cli.app import app

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


def _written() -> str:
    return PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
