"""What the documents say runs."""

import re
import runpy
from pathlib import Path

import pytest
import tiny_pipeline
import vits
from diffusers import StableDiffusionPipeline
from PIL import Image

from tokenmerge import presets
from tokenmerge.planners import PLANNERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tiny_pipeline.write_pipeline(tmp_path_factory.mktemp("models") / "tiny")
    loaded = StableDiffusionPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", code("python"))
def test_the_python_of_the_readme_runs(snippet, pipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        "pipe": pipe,
        "vit": vits.vit(num_hidden_layers=12, image_size=224, patch_size=16),
        "pixel_values": vits.pictures(size=224),
        "picture": Image.new("RGB", (224, 224)),
    }
    exec(compile(snippet, "README.md", "exec"), names)


def test_the_readme_shows_python():
    assert len(code("python")) == 3


def commands() -> list[str]:
    lines = "".join(code("sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.startswith("tokenmerge")]


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_readme_have_the_options_they_use(line):
    from typer.main import get_command

    from tokenmerge.cli.app import app

    name = line.split()[1]
    known = {option for parameter in get_command(app).commands[name].params for option in parameter.opts}
    known.add("--help")  # which Click answers itself
    assert set(re.findall(r"--[\w-]+", line)) <= known


def test_the_files_that_the_documents_link_to_are_there():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_method_is_described():
    methods = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for planner in PLANNERS:
        assert f"\n### {planner}\n" in methods
    for preset in presets.__all__:
        assert f"`presets.{preset}`" in methods


def test_the_tables_of_closeness_say_what_the_records_say():
    written = runpy.run_path(str(ROOT / "docs" / "price_curves.py"))
    for path, text in written["with_tables"](written["curves"]()).items():
        assert text.count("<!-- closeness") == 1
        assert text == (ROOT / path).read_text(encoding="utf-8")


def test_the_two_commands_are_named_and_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
    assert "make test" in (ROOT / ".ci/run").read_text(encoding="utf-8")
