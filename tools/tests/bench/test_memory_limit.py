from __future__ import annotations

from pathlib import Path

import pytest

from tokenmerge_tools import machine

KB, MB = 2**10, 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system with 1000 MB of available memory and no control groups yet."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1\nMemAvailable: {1000 * KB} kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "groups")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_control_groups_it_is_what_the_machine_has(groups: Path) -> None:
    assert machine.available_memory() == 1000 * MB
    (groups / "cgroup").write_text("0::/user\n3:cpu:/user\n")
    assert machine.available_memory() == 1000 * MB
    (groups / "meminfo").unlink()
    assert machine.available_memory() is None


def test_cache_that_can_be_given_up_is_not_in_use(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/\n")
    stat = f"anon 5\ninactive_file {300 * MB}\nactive_file 7"
    write(groups / "groups", memory__max=500 * MB, memory__current=400 * MB, memory__stat=stat)
    assert machine.available_memory() == 400 * MB


def test_every_group_around_the_process_counts(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/job/step\n")
    stat = "inactive_file 0"
    write(groups / "groups" / "job", memory__max=200 * MB, memory__current=150 * MB, memory__stat=stat)
    write(groups / "groups" / "job" / "step", memory__max="max", memory__current=MB, memory__stat=stat)
    assert machine.available_memory() == 50 * MB
    write(groups / "groups" / "job", memory__current=250 * MB)
    assert machine.available_memory() == 0


def test_in_a_container_the_root_counts(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/docker/seen-from-outside\n")
    stat = f"inactive_file {10 * MB}"
    write(groups / "groups", memory__max=100 * MB, memory__current=70 * MB, memory__stat=stat)
    assert machine.available_memory() == 40 * MB
