"""Settings of Sphinx for the site that ``make docs`` builds."""

import json
import re
from pathlib import Path
from typing import Any

import tokenmerge

project = "tokenmerge"
author = "The tokenmerge authors"
project_copyright = author
version = release = tokenmerge.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# docs/notebook.py stores the outputs; the tests run the notebook.
nb_execution_mode = "off"

myst_heading_anchors = 4
myst_enable_extensions = ["fieldlist"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88

# Code blocks without a language are trees and messages, not Python.
highlight_language = "none"

html_theme = "furo"
html_title = f"tokenmerge {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/tokenmerge/tokenmerge/",
    "source_branch": "main",
    "source_directory": "docs/",
    "light_css_variables": {"color-brand-primary": "#1f6f54", "color-brand-content": "#1f6f54"},
    "dark_css_variables": {"color-brand-primary": "#7fd1ae", "color-brand-content": "#7fd1ae"},
}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = re.escape("$ ")
copybutton_prompt_is_regexp = True


def _escape_bars(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Keep |x| in a docstring, which reStructuredText would take for a substitution."""
    lines[:] = [line if line.lstrip().startswith(">>>") else line.replace("|", r"\|") for line in lines]


def _link_to_files(app: Any, page: str, content: list[str]) -> None:
    """Let links to Markdown files that are no pages of the site download them; other files do so by themselves."""
    folder = (Path(app.srcdir) / page).parent

    def link(found: re.Match[str]) -> str:
        outside = not (folder / found[1]).resolve().is_relative_to(app.srcdir)
        return f"](path:{found[1]})" if outside else found[0]

    content[0] = re.sub(r"\]\((\.\./[^)#]*\.md)\)", link, content[0])


# The pages hold no directives, so that they can be read on a code host too. These are added while the site is built.
_CONTENTS = json.loads(Path(__file__).with_name("contents.json").read_text(encoding="utf-8"))
# Pages that are a file of the repository.
_FILES = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "upgrading": "UPGRADING.md"}
_INCLUDE = "```{{include}} ../{file}\n:relative-docs: docs/\n:relative-images:\n```\n"
_DOCUMENTED = re.compile(r"<!-- documented -->\n(.*?)<!-- end -->\n", flags=re.DOTALL)
_OBJECT = re.compile(
    r"- (function|class|module) `([\w.]+)`(?: and (its members|all its members|what is in it)|: (.*))?"
)


def _add_directives(app: Any, page: str, content: list[str]) -> None:
    """Put the table of contents, included files and documented objects into a page."""
    if page in _FILES:
        content[0] = _INCLUDE.format(file=_FILES[page])
    text = _DOCUMENTED.sub(_documented, content[0])
    for group in _CONTENTS.get(page, ()):
        caption = f":caption: {group['caption']}\n" if group["caption"] else ""
        pages = "\n".join(group["pages"])
        text += f"\n```{{toctree}}\n{caption}:hidden:\n\n{pages}\n```\n"
    content[0] = text


def _documented(found: re.Match[str]) -> str:
    """Return the directives of the objects that a list names."""
    lines = ["```{eval-rst}"]
    for line in found[1].splitlines():
        item = _OBJECT.fullmatch(line)
        if item is None:
            raise ValueError(f"docs/api.md: expected an object and its path, got {line!r}")
        kind, path, members, names = item.groups()
        lines.append(f".. auto{kind}:: {path}")
        if members:
            lines.append("   :members:")
        if members == "all its members":
            lines.append("   :inherited-members:")
        if names:
            lines.append(f"   :members: {names.replace('`', '')}")
            lines.append("   :show-inheritance:")
        if kind == "class":
            lines.append("   :exclude-members: __init__, __new__")
    return "\n".join([*lines, "```", ""])


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("source-read", _add_directives)
    app.connect("source-read", _link_to_files)
    app.connect("autodoc-process-docstring", _escape_bars)
