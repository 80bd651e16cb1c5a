from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tokenmerge_tools import machine


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.example")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is committed in a git checkout."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    (folder / "b.bin").write_bytes(b"\0\1")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    monkeypatch.setattr(machine, "_SOURCES", (folder,))
    return folder


def test_every_state_of_the_source_has_a_name_of_its_own(package: Path) -> None:
    clean = machine.source_commit()
    assert clean
    assert "+" not in clean
    names = [clean]
    for path, content in (("a.py", b"a = 2\n"), ("a.py", b"a = 3\n"), ("b.bin", b"\0\2"), ("new.py", b"a")):
        (package / path).write_bytes(content)
        names.append(machine.source_commit())
    (package / "new.py").write_bytes(b"b")
    names.append(machine.source_commit())
    assert len(set(names)) == len(names) == 6
    assert all(name.startswith(f"{clean}+changes-") for name in names[1:])
    assert machine.source_commit() == names[-1]


def test_what_is_not_source_changes_no_name(package: Path) -> None:
    clean = machine.source_commit()
    (package / "a.pyc").write_bytes(b"compiled")
    (package.parent / "notes.txt").write_text("elsewhere")
    assert machine.source_commit() == clean


def test_outside_a_checkout_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SOURCES", (tmp_path,))
    assert machine.source_commit() is None
