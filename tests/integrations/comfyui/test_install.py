"""The folder for ``custom_nodes``: its files, and that ComfyUI's own loader accepts it."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import comfy_hosts  # noqa: F401  (first: it brings ComfyUI's code)

import pytest  # isort: skip
from comfy_config.config_parser import extract_node_configuration

import tokenmerge
from tokenmerge.errors import ConfigError
from tokenmerge.integrations.comfyui.install import NAME, SOURCE, install
from tokenmerge.integrations.comfyui.nodes import TokenMerging
from tokenmerge.integrations.comfyui.settings import Asked

ROOT = Path(__file__).parents[3]

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "custom_nodes").mkdir()
    return tmp_path


@pytest.mark.parametrize("place", ["", "custom_nodes"])
def test_the_folder_is_written_and_written_again(folder, place):
    files = install(folder / place)
    assert {file.parent.parent.name for file in files} <= {"custom_nodes", NAME}
    assert {file.name for file in files} >= {"__init__.py", "pyproject.toml", "requirements.txt"}
    files[0].write_text("old")
    assert install(folder / place) == files
    for file in files:
        own = SOURCE / file.relative_to(folder / "custom_nodes" / NAME)
        checkout = f"tokenmerge @ {ROOT.as_uri()}\n".encode()
        assert file.read_bytes() == (checkout if file.name == "requirements.txt" else own.read_bytes())


def test_the_requirement_is_the_release_once_there_is_one(folder, monkeypatch):
    monkeypatch.setattr("tokenmerge.integrations.comfyui.install.checkout", lambda: None)
    (written,) = [file for file in install(folder) if file.name == "requirements.txt"]
    assert written.read_text() == (SOURCE / "requirements.txt").read_text()


def test_without_the_library_the_node_says_what_to_install(folder):
    """It names the checkout that the folder is linked from, or the list that was written beside it."""
    written = install(folder)[0].parent
    linked = folder / "custom_nodes" / "linked"
    linked.symlink_to(SOURCE)
    for place, needed in ((linked, str(ROOT)), (written, f"-r {written / 'requirements.txt'}")):
        script = f"import sys; sys.modules['tokenmerge'] = None; __import__({place.name!r})"
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=place.parent, capture_output=True, text=True, check=False
        )
        last = done.stderr.strip().splitlines()[-1]
        assert last.endswith(f"run that Python with -m pip install {needed}")


def test_what_is_no_folder_of_comfyui_is_refused(folder, tmp_path_factory):
    with pytest.raises(ConfigError, match="custom_nodes"):
        install(tmp_path_factory.mktemp("empty"))
    (folder / "custom_nodes" / NAME).symlink_to(SOURCE)
    with pytest.raises(ConfigError, match="link"):
        install(folder)


def contents(folder):
    """Every path in a folder, with the bytes of files and the targets of links."""
    return {
        place: place.readlink() if place.is_symlink() else place.is_file() and place.read_bytes()
        for place in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "place",
    ["", "__init__.py", "pyproject.toml", "example_workflows", "example_workflows/tokenmerge-sd15.json"],
)
@pytest.mark.parametrize("kind", ["a file", "a folder", "nothing"])
@pytest.mark.parametrize("installed", [True, False])
def test_links_inside_the_folder_are_refused(folder, tmp_path_factory, place, kind, installed):
    """What a link leads to is written neither through the link nor in its place."""
    link = folder / "custom_nodes" / NAME / place
    if installed:
        install(folder)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine.txt").write_text("mine")
    targets = {"a file": elsewhere / "mine.txt", "a folder": elsewhere, "nothing": elsewhere / "absent"}
    link.symlink_to(targets[kind])
    before = contents(folder), contents(elsewhere)
    with pytest.raises(ConfigError, match=f"{link.name} is a link; remove it"):
        install(folder)
    assert (contents(folder), contents(elsewhere)) == before


def test_custom_nodes_itself_may_be_a_link(tmp_path):
    (tmp_path / "nodes").mkdir()
    (tmp_path / "custom_nodes").symlink_to(tmp_path / "nodes")
    assert all(file.is_file() for file in install(tmp_path))
    assert (tmp_path / "nodes" / NAME / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["__init__.py", "pyproject.toml", "notes.txt"])
def test_a_folder_of_somebody_else_stays_as_it_is(folder, name):
    other = folder / "custom_nodes" / NAME
    other.mkdir()
    (other / name).write_text("mine")
    with pytest.raises(ConfigError, match="not of this node; move it"):
        install(folder)
    assert contents(other) == {other / name: b"mine"}


def test_other_files_in_the_folder_stay(folder):
    own = install(folder)[0].parent / "example_workflows" / "mine.json"
    own.write_text("mine")
    install(folder)
    assert own.read_text() == "mine"


@pytest.mark.parametrize("kept", ["__init__.py/mine.txt", "example_workflows"])
def test_a_folder_in_the_place_of_a_file_and_the_reverse_are_refused(folder, kept):
    for file in install(folder):
        if "__init__.py" in file.name or "example_workflows" in file.parts:
            file.unlink()
    own = folder / "custom_nodes" / NAME / kept
    if kept == "example_workflows":
        own.rmdir()
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    before = contents(folder)
    with pytest.raises(ConfigError, match="is in the way; move it"):
        install(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("installed", [True, False])
def test_a_full_disk_leaves_nothing_half_written(folder, monkeypatch, installed):
    if installed:
        install(folder)[0].write_text("old")
    before, copy = contents(folder), shutil.copyfile

    def full(source, place):
        if source.suffix == ".toml":
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(source, place)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        install(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("path", ["~nobody-has-this-name/x", "x" * 5000, "a\0b"])
def test_a_path_that_cannot_be_is_refused_in_a_sentence(path):
    with pytest.raises(ConfigError, match="custom_nodes"):
        install(path)


def test_what_the_registry_asks_for():
    """By docs.comfy.org/registry/specifications."""
    facts = tomllib.loads((SOURCE / "pyproject.toml").read_text())
    project, name = facts["project"], facts["project"]["name"]
    assert re.fullmatch(r"[A-Za-z]+([-_.]?[A-Za-z0-9]+)*", name)
    assert len(name) < 100
    assert "comfyui" not in name.lower()
    assert project["version"] == tokenmerge.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["license"].keys() in ({"text"}, {"file"})
    assert project["description"]
    assert project["urls"]["Repository"].startswith("https://github.com/")
    assert facts["tool"]["comfy"].keys() >= {"PublisherId", "DisplayName", "requires-comfyui"}
    read = extract_node_configuration(str(SOURCE))  # by ComfyUI's own code
    assert read.project.name == name
    assert read.tool_comfy.display_name == "Token Merging"
    needed = f"tokenmerge>={tokenmerge.__version__}"
    assert facts["project"]["dependencies"] == [needed]
    assert (SOURCE / "requirements.txt").read_text().split() == [needed]


def test_the_written_folder_has_the_node(folder):
    path = install(folder)[0].parent
    spec = importlib.util.spec_from_file_location("written_node", path / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {"TokenMerging": TokenMerging} == module.NODE_CLASS_MAPPINGS
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()


@pytest.mark.parametrize(
    "file", sorted((SOURCE / "example_workflows").glob("*.json")), ids=lambda file: file.stem
)
def test_the_links_of_a_workflow_fit_its_nodes(file):
    workflow = json.loads(file.read_text())
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}
    assert len(nodes) == len(workflow["nodes"])
    for number, source, out, target, into, kind in workflow["links"]:
        given, taken = nodes[source]["outputs"][out], nodes[target]["inputs"][into]
        assert number in given["links"]
        assert number == taken["link"]
        assert given["type"] == kind
        assert taken["type"] in (kind, "*")
    inputs = [value["link"] for node in nodes.values() for value in node["inputs"]]
    assert sorted(inputs) == sorted(links)
    merging = next(node for node in nodes.values() if node["type"] == "TokenMerging")
    known = TokenMerging.INPUT_TYPES()
    widgets = [
        value
        for value in {**known["required"], **known["optional"]}.values()
        if value[0] not in ("MODEL", "LATENT")
    ]
    assert len(merging["widgets_values"]) == len(widgets)
    for value, (kind, facts) in zip(merging["widgets_values"], widgets, strict=True):
        assert value in kind if isinstance(kind, list) else facts["min"] <= value <= facts["max"]


def test_inputs_of_the_node_are_those_of_its_function():
    own = ["model", "latent"]
    assert [*inspect.signature(TokenMerging.merge).parameters] == ["self", *own, "inputs"]
    known = TokenMerging.INPUT_TYPES()
    names = [name for name in (*known["required"], *known["optional"]) if name not in own]
    assert names == [field.name for field in dataclasses.fields(Asked)]
