"""The version and the address of the repository have one place each, and every other file says the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tokenmerge

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def places(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / ".ci" / "places.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_file_names_the_same_version_and_repository():
    done = places("--check")
    assert done.returncode == 0, done.stderr


def test_a_tag_of_another_version_is_refused():
    assert places("--check", f"v{tokenmerge.__version__}").returncode == 0
    done = places("--check", "v99.0.0")
    assert done.returncode == 1
    assert f"name it v{tokenmerge.__version__}" in done.stderr


def test_the_badges_say_what_the_distributions_ask_for():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    facts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (python,) = re.findall(r'^requires-python = ">=([\d.]+)"$', facts, flags=re.MULTILINE)
    (torch,) = re.findall(r'^dependencies = \["torch>=([\d.]+)"\]$', facts, flags=re.MULTILINE)
    (licence,) = re.findall(r'^license = "(.+)"$', facts, flags=re.MULTILINE)
    for badge in (f"python-{python}%2B-", f"torch-{torch}%2B-", f"licence-{licence}-"):
        assert badge in readme


def test_no_other_file_has_an_address_of_the_repository():
    script = (ROOT / ".ci" / "places.py").read_text(encoding="utf-8")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        file = ROOT / name
        if file.suffix in (".md", ".py", ".toml", ".yml", ".yaml", ".cff", ".ipynb", ".txt"):
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            if re.search(r"github\.com/[\w-]+/tokenmerge\b|github\.io/tokenmerge", text):
                assert name.endswith((".ci/places.py", "test_places.py")) or Path(name).name in script, name


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_are_workflows():
    assert [file.stem for file in WORKFLOWS] == ["checks", "release", "site"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_the_steps_of_a_workflow_are_targets_of_the_makefile(workflow):
    """So what runs there runs here too. Other commands install make, or write to the repository."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for step in steps(workflow):
        if "uses" in step:
            assert re.search(r"@v\d+(\.\d+)*$", step["uses"]), f"{step['uses']} names no version"
        elif not step["run"].startswith(("gh release create ", "choco install make ")):
            for command in step["run"].splitlines():
                make, target, *_ = command.split()
                assert make == "make"
                assert target in targets or target.startswith("${{"), command


def test_the_workflows_run_what_the_script_of_ci_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:start \w+ )?(?:part )?make (.+)$", script, flags=re.MULTILINE)
    here = {word for command in commands for word in command.split()}
    here = {word for word in here if re.fullmatch(r"[a-z][a-z-]+", word)}
    there = " ".join(file.read_text(encoding="utf-8") for file in WORKFLOWS)
    assert here >= {"test", "test-slow", "docs", "lint-workflows"}
    for target in here - {"environments"}:
        assert re.search(rf"\b{target}\b", there), f"no workflow runs make {target}"
