"""What ``pip install`` is told to take: a checkout's folder while there is no release, and the name of one
after."""

import json
import runpy
import shutil
from pathlib import Path

import pytest

from tokenmerge import MissingExtraError, origin

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a folder as pip installs into, with this module and the notes of the package, and nothing
    else."""
    folder = tmp_path / "site-packages"
    (folder / "tokenmerge").mkdir(parents=True)
    shutil.copy(origin.__file__, folder / "tokenmerge")
    notes = folder / "tokenmerge-9.9.9.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.4\nName: tokenmerge\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(folder)
    return folder


def installed(site: Path, **facts: object) -> dict:
    """Return the names of the module in that folder, installed as pip notes it; without facts, from a
    registry."""
    if facts:
        (site / "tokenmerge-9.9.9.dist-info" / "direct_url.json").write_text(json.dumps(facts))
    return runpy.run_path(str(site / "tokenmerge" / "origin.py"))


def test_a_release_is_named_by_its_name(site):
    module = installed(site)
    assert module["checkout"]() is None
    for requirement in ("tokenmerge[paddle]", "tokenmerge-tools[metrics]", "tokenmerge-tools", "torch"):
        assert module["installable"](requirement) == requirement


def test_a_file_of_a_release_is_named_by_its_name_too(site):
    wheel = "file:///tmp/tokenmerge-9.9.9-py3-none-any.whl"
    module = installed(site, url=wheel, archive_info={})
    assert module["installable"]("tokenmerge-tools[plots]") == "tokenmerge-tools[plots]"


def test_what_was_installed_from_a_checkout_names_its_folders(site, tmp_path):
    root = tmp_path / "my checkout"
    (root / "tools").mkdir(parents=True)
    (root / "tools" / "pyproject.toml").touch()
    module = installed(site, url=root.as_uri(), dir_info={})
    assert module["installable"]("tokenmerge[paddle]") == f"{root}[paddle]"
    assert module["installable"]("tokenmerge-tools[metrics]") == f"{root / 'tools'}[metrics]"
    assert module["installable"]("diffusers") == "diffusers"
    shutil.rmtree(root)
    assert module["installable"]("tokenmerge[paddle]") == "tokenmerge[paddle]"


def test_what_was_installed_from_git_names_the_same_commit(site):
    vcs = {"vcs": "git", "commit_id": COMMIT}
    module = installed(site, url="https://example.org/tokenmerge.git", vcs_info=vcs)
    address = f"git+https://example.org/tokenmerge.git@{COMMIT}"
    assert module["installable"]("tokenmerge[paddle]") == f"tokenmerge[paddle] @ {address}"
    tools = f"tokenmerge-tools[play] @ {address}#subdirectory=tools"
    assert module["installable"]("tokenmerge-tools[play]") == tools


def test_a_checkout_that_is_not_installed_is_found_beside_the_package(site, tmp_path):
    package = tmp_path / "src" / "tokenmerge"
    package.mkdir(parents=True)
    shutil.copy(origin.__file__, package)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "pyproject.toml").touch()
    module = runpy.run_path(str(package / "origin.py"))
    assert module["installable"]("tokenmerge-tools[all]") == f"{tmp_path / 'tools'}[all]"


def test_the_error_of_a_missing_extra_says_it(monkeypatch, tmp_path):
    for root, told in ((tmp_path, f"{tmp_path / 'tools'}[play]"), (None, "tokenmerge-tools[play]")):
        monkeypatch.setattr(origin, "checkout", lambda root=root: root)
        monkeypatch.setattr(origin, "_direct_url", dict)
        error = MissingExtraError("tokenmerge-tools[play]", needed_by="tokenmerge play needs gradio")
        assert str(error).endswith(f'run: pip install "{told}"')
