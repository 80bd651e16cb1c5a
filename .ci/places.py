"""Write the version and the address of the repository wherever they stand, from the one place that has each.

    python .ci/places.py           # writes
    python .ci/places.py --check   # changes nothing; fails and names each file that says something else
    python .ci/places.py --check v0.2.0   # fails too if the tag of a release is of another version

The version is that of ``src/tokenmerge/__init__.py``, which both distributions read. The address is
``Repository`` in ``pyproject.toml``. The repository is on GitHub, and its name is tokenmerge.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODE = "src/tokenmerge/integrations/comfyui/custom_node"
# Files that name the repository.
ADDRESSES = (
    ".github/CODEOWNERS",
    ".github/ISSUE_TEMPLATE/config.yml",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "README.md",
    "docs/conf.py",
    "docs/notebook.ipynb",
    "pyproject.toml",
    "tools/pyproject.toml",
    f"{NODE}/pyproject.toml",
)
# Lines that name the version, as a pattern and what it becomes.
VERSIONS = (
    ("CITATION.cff", r"^version: .*$", "version: {}"),
    ("tools/pyproject.toml", r'^    "tokenmerge==.*",$', '    "tokenmerge=={}",'),
    (f"{NODE}/pyproject.toml", r'^version = ".*"$', 'version = "{}"'),
    (f"{NODE}/pyproject.toml", r'^dependencies = \["tokenmerge>=.*"\]$', 'dependencies = ["tokenmerge>={}"]'),
    (f"{NODE}/requirements.txt", r"^tokenmerge>=.*$", "tokenmerge>={}"),
)


def version() -> str:
    """Return the version that both distributions have."""
    return _first(r'^__version__ = "(.+)"$', "src/tokenmerge/__init__.py")


def owner() -> str:
    """Return the account that the repository belongs to."""
    return _first(r'^Repository = "https://github\.com/([\w-]+)/tokenmerge"$', "pyproject.toml")


def _first(pattern: str, file: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found is None:
        raise SystemExit(f"{file} has no line like {pattern}")
    return found[1]


def texts() -> dict[str, str]:
    """Return each file that names the version or the address, as it should be."""
    name = owner()
    found = {file: (ROOT / file).read_text(encoding="utf-8") for file in ADDRESSES}
    for file, text in found.items():
        text = re.sub(r"github\.com/[\w-]+/tokenmerge\b", f"github.com/{name}/tokenmerge", text)
        text = re.sub(
            r"colab\.research\.google\.com/github/[\w-]+/", f"colab.research.google.com/github/{name}/", text
        )
        text = re.sub(
            r"https://[\w-]+\.github\.io/tokenmerge/", f"https://{name}.github.io/tokenmerge/", text
        )
        found[file] = re.sub(r"@[\w-]+/maintainers", f"@{name}/maintainers", text)
    for file, pattern, line in VERSIONS:
        text = found.get(file) or (ROOT / file).read_text(encoding="utf-8")
        found[file], count = re.subn(pattern, line.format(version()), text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{file}: expected one line like {pattern}, got {count}")
    return found


def main(arguments: list[str]) -> int:
    """Write, or compare with ``--check``; return the exit code."""
    check = "--check" in arguments
    tags = [name for name in arguments if name != "--check"]
    wrong = [name for name in tags if name != f"v{version()}"]
    for name in wrong:
        print(f"the tag {name} is not that of version {version()}; name it v{version()}", file=sys.stderr)
    changed = {
        file: text for file, text in texts().items() if text != (ROOT / file).read_text(encoding="utf-8")
    }
    for file, text in changed.items():
        if check:
            print(f"{file} names another version or address; run: python .ci/places.py", file=sys.stderr)
        else:
            (ROOT / file).write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    return int(bool(wrong) or (check and bool(changed)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
