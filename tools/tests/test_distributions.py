"""The distributions as users get them: built, installed from their files, and run outside the checkout.

An empty virtual environment would download PyTorch and diffusers, gigabytes of them. So the packages of
others that the distributions ask for are linked into it from the environment of the tests, with their notes,
each of them alone: pip finds them installed, and refuses if one is missing. Our own two are installed from
their wheels.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tokenmerge

ROOT = Path(__file__).parents[2]
LIBRARY = ["torch"]
TOOLS = [*LIBRARY, "accelerate", "diffusers", "pillow", "rich", "safetensors", "transformers", "typer"]
EXTRAS = [*TOOLS, "jinja2", "matplotlib", "torchmetrics"]

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, fails: bool = False) -> str:
    """Return what a command prints; fail unless it ends as expected."""
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    printed = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, printed
    return printed


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["make", "dist", f"DIST={folder}", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    return folder


def closure(names: Iterable[str]) -> set[str]:
    """Return these distributions and all that they ask for, without extras."""
    found: set[str] = set()
    left = [Requirement(name) for name in names]
    while left:
        wanted = left.pop()
        try:
            own = distribution(wanted.name)
        except PackageNotFoundError:
            continue  # for another system
        extras = ["", *wanted.extras]
        if wanted.name in found and not wanted.extras:
            continue
        found.add(wanted.name)
        for text in own.requires or []:
            other = Requirement(text)
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(other)
    return found


def environment(folder: Path, names: Iterable[str]) -> Path:
    """Make a virtual environment with these distributions of others alone; return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    site = Path(paths["purelib"])
    for name in closure(names):
        own = distribution(name)
        for top in {file.parts[0] for file in own.files or [] if file.parts[0] != ".."}:
            link = site / top
            if not link.exists() and top != "__pycache__":
                link.symlink_to(Path(str(own.locate_file(top))))
    return Path(paths["scripts"])


def install(programs: Path, built: Path, *requirements: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", "--find-links", built, *requirements, cwd=built)


def test_the_files_have_one_version_and_only_what_they_need(built):
    version = tokenmerge.__version__
    assert sorted(file.name for file in built.iterdir()) == sorted(
        f"{name}-{version}{ending}"
        for name in ("tokenmerge", "tokenmerge_tools")
        for ending in (".tar.gz", "-py3-none-any.whl")
    )
    for name in ("tokenmerge", "tokenmerge_tools"):
        with zipfile.ZipFile(built / f"{name}-{version}-py3-none-any.whl") as wheel:
            files = wheel.namelist()
            notes = f"{name}-{version}.dist-info"
            assert {file.split("/")[0] for file in files} == {name, notes}
            assert f"{name}/py.typed" in files
            assert any(file.startswith(f"{notes}/licenses/") for file in files)
            facts = wheel.read(f"{notes}/METADATA").decode()
        for line in ("Author", "Keywords", "Project-URL: Repository", "Project-URL: Documentation"):
            assert re.search(f"^{line}", facts, flags=re.MULTILINE), f"{name}: {line}"
        head, _, description = facts.partition("\n\n")
        assert "Description-Content-Type: text/markdown" in head
        # A page of a registry has no files beside it.
        assert not re.findall(r"\]\((?!https?://)[^)]*\)", description)


def test_the_library_alone_runs_from_its_wheel(built, tmp_path):
    programs = environment(tmp_path / "library", LIBRARY)
    install(programs, built, "tokenmerge")
    script = (
        "import tokenmerge, torch\n"
        "print(tokenmerge.__file__)\n"
        "try:\n"
        "    tokenmerge.apply_token_merging(torch.nn.Linear(2, 2), speedup=2.0)\n"
        "except tokenmerge.UnsupportedModelError as error:\n"
        "    print('refused:', error)\n"
        "try:\n"
        "    import tokenmerge.paddle\n"
        "except tokenmerge.MissingExtraError as error:\n"
        "    print(error)\n"
    )
    printed = run(programs / "python", "-c", script, cwd=tmp_path)
    assert printed.startswith(str(tmp_path / "library"))
    assert "refused:" in printed
    assert 'pip install "tokenmerge[paddle]"' in printed  # a file of a release has no folder
    (tmp_path / "ComfyUI" / "custom_nodes").mkdir(parents=True)
    command = "tokenmerge.integrations.comfyui.install"
    printed = run(programs / "python", "-m", command, tmp_path / "ComfyUI", cwd=tmp_path)
    assert "requirements.txt" in printed


FIRST_CALL = """
import tokenmerge, torch
from diffusers import DiffusionPipeline
from tokenmerge_tools import demo

pipe = DiffusionPipeline.from_pretrained(demo.path("emoji-unet"))
pipe.set_progress_bar_config(disable=True)
patch = tokenmerge.apply_token_merging(pipe, speedup=1.5)
seed = torch.Generator().manual_seed(0)
print(pipe("a castle", height=128, width=128, num_inference_steps=6, generator=seed).images[0].size)
print(patch)
patch.remove()
"""


def test_the_tools_without_extras_run_from_their_wheel(built, tmp_path):
    programs = environment(tmp_path / "tools", TOOLS)
    install(programs, built, "tokenmerge-tools")
    printed = run(programs / "python", "-W", "ignore", "-c", FIRST_CALL, cwd=tmp_path)
    assert "(128, 128)" in printed
    assert "the default method, speedup=1.5" in printed
    assert run(programs / "tokenmerge", "--version", cwd=tmp_path).strip() == tokenmerge.__version__
    drawn = [
        programs / "tokenmerge",
        "generate",
        "a castle",
        "--size",
        "128",
        "--steps",
        "4",
        "--out",
        "here",
    ]
    printed = run(*drawn, cwd=tmp_path)
    assert (tmp_path / "here" / "comparison.png").is_file()
    assert 'pip install "tokenmerge-tools[metrics]"' in printed.replace("\n", " ")


def test_the_tools_with_extras_measure_and_report(built, tmp_path):
    programs = environment(tmp_path / "extras", EXTRAS)
    install(programs, built, "tokenmerge-tools[all]")
    drawn = [
        programs / "tokenmerge",
        "generate",
        "a castle",
        "--size",
        "128",
        "--steps",
        "4",
        "--out",
        "here",
    ]
    printed = run(*drawn, cwd=tmp_path)
    assert "dB" in printed
    assert "pip install" not in printed
    counted = [programs / "tokenmerge", "bench", "--help"]
    assert "--variant" in run(*counted, cwd=tmp_path)


def test_a_missing_requirement_is_refused(built, tmp_path):
    """So that the tests above do not pass with an environment that has too much."""
    programs = environment(tmp_path / "empty", [])
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check"]
    said = run(*pip, "install", "--no-index", "--find-links", built, "tokenmerge", cwd=built, fails=True)
    assert "torch" in said
