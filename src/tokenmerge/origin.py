"""Where this package was installed from, and so what ``pip install`` can take for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The folder of each distribution in a checkout.
_FOLDERS = {"tokenmerge": "", "tokenmerge-tools": "tools"}


def installable(requirement: str) -> str:
    """Return what ``pip install`` takes for a requirement, as this package itself was installed.

    For the distributions of this project it is a folder if the package is in a checkout or was installed from
    one, an address of git if it was installed from there, and the name for every release. Other requirements
    stay as they are.

    >>> installable("diffusers>=0.36")
    'diffusers>=0.36'
    """
    name, bracket, extras = requirement.partition("[")
    folder = _FOLDERS.get(name)
    if folder is None:
        return requirement
    root = checkout()
    if root is not None:
        return f"{root / folder}{bracket}{extras}"
    facts = _direct_url()
    if "vcs_info" in facts:
        version = facts["vcs_info"].get("commit_id", "main")
        part = f"#subdirectory={folder}" if folder else ""
        return f"{requirement} @ git+{facts['url']}@{version}{part}"
    return requirement


def checkout() -> Path | None:
    """Return the checkout that the package runs in or was installed from, or None if there is none."""
    from urllib.parse import urlparse  # only errors need this, and it takes longer than the package itself
    from urllib.request import url2pathname

    folders = [Path(__file__).parents[2]]
    facts = _direct_url()
    if "dir_info" in facts:
        folders.append(Path(url2pathname(urlparse(facts["url"]).path)))
    return next((folder for folder in folders if (folder / "tools" / "pyproject.toml").is_file()), None)


def _direct_url() -> dict[str, Any]:
    """Return what pip noted of a package that comes from no registry (PEP 610); empty for a release."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution("tokenmerge").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
