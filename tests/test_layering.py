"""Imports go down only, and importing the package does nothing else."""

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import tokenmerge

ROOT = Path(tokenmerge.__file__).parent

# What each part imports besides its own files, no more and no less. A part is a folder or a file at the top
# of the package, a folder of integrations, or a room of runtime.
MAY_IMPORT = {
    "origin": "",
    "errors": "origin",
    "text_table": "errors",
    "warn": "",
    "ops": "",
    "merge": "errors ops",
    "config": "errors warn",
    "presets": "config",
    "integrations.portable": "config",
    "integrations.paddle": "errors text_table config presets integrations.portable",
    "paddle": "integrations.paddle",
    "planners": "ops config",
    "models": "errors ops",
    "plans": "ops config models",
    "calibration": "ops config planners plans",
    "runtime.steps": "errors ops config models plans",
    "runtime.memory": "errors warn ops config models plans runtime.steps",
    "runtime.blocks": "errors ops config planners models plans runtime.steps runtime.memory",
    "runtime.patching": "errors ops config planners models plans runtime.steps runtime.memory runtime.blocks",
    "images": "",
    "pictures": "warn images",
    "report": "errors warn text_table config models plans calibration "
    "runtime.steps runtime.memory runtime.patching",
    "default_method": "errors config models plans calibration runtime.steps runtime.memory",
    "tuned_method": "config models plans default_method",
    "ratio_method": "config models plans default_method",
    "integrations.comfyui": "origin errors ops config presets planners models plans calibration "
    "runtime.steps runtime.memory runtime.blocks default_method",
    "handle": "errors config models plans calibration runtime.steps runtime.memory runtime.patching report",
    "vit": "errors text_table ops config models runtime.steps runtime.memory runtime.patching report handle",
    "api": "errors config presets models runtime.steps runtime.memory runtime.patching "
    "default_method tuned_method ratio_method handle vit",
    "integrations.serving": "errors config api",
    "compat": "errors config presets api",
    "pipeline_methods": "errors compat",
}
OPTIONAL = (
    "integrations.paddle",
    "integrations.portable",
    "integrations.serving",
    "paddle",
    "images",
    "pictures",
    "pipeline_methods",
)
# The families' files, and the module that finds them, are for code that has a pipeline.
FAMILIES = ("tokenmerge.models.families", "tokenmerge.models.find")


def imports(file: Path) -> set[str]:
    """Modules of the package that a file imports, at its top level or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name for name in names if name.startswith("tokenmerge.")}
    return found


def part_of(names: Sequence[str]) -> str:
    """The part of the package that a module is in, from the names in its path."""
    return ".".join(names[: 2 if names[0] in ("integrations", "runtime") else 1])


def part(file: Path) -> str:
    return part_of(file.relative_to(ROOT).with_suffix("").parts)


def files() -> list[Path]:
    return [file for file in sorted(ROOT.rglob("*.py")) if part(file).split(".")[-1] != "__init__"]


def test_every_part_has_its_line():
    assert {part(file) for file in files()} == MAY_IMPORT.keys()


def test_imports_go_down_only():
    parts = list(MAY_IMPORT)
    for i, (here, allowed) in enumerate(MAY_IMPORT.items()):
        assert set(allowed.split()) <= set(parts[:i]), f"{here} may import only parts above its line"
    found: dict[str, set[str]] = {here: set() for here in parts}
    for file in files():
        here = part(file)
        for name in imports(file):
            there = part_of(name.split(".")[1:])
            version = name == "tokenmerge.__version__"
            assert there in {here, *MAY_IMPORT[here].split()} or version, (
                f"{file.relative_to(ROOT)} imports {name}"
            )
            found[here] |= {there} - {here, "__version__"}
    assert {here: set(allowed.split()) for here, allowed in MAY_IMPORT.items()} == found


def test_what_runs_in_a_patched_model_knows_no_family():
    for file in files():
        if part(file).startswith("runtime."):
            for name in imports(file):
                assert not name.startswith(FAMILIES), f"{file.relative_to(ROOT)} imports {name}"


def test_of_the_core_only_swap_swaps_classes():
    swapping = [file for file in files() if "__class__ =" in file.read_text(encoding="utf-8")]
    core = [file.relative_to(ROOT).as_posix() for file in swapping if part(file) not in OPTIONAL]
    assert core == ["runtime/patching/swap.py"]


def test_the_core_needs_torch_alone():
    for file in files():
        if part(file) not in OPTIONAL:
            modules = {
                name.split(".")[0]
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                for name in (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
            }
            assert modules <= {"tokenmerge", "torch"} | sys.stdlib_module_names, file


def test_settings_need_no_torch():
    """A file of settings can be checked without torch."""
    for file in files():
        if part(file) == "config":
            text = file.read_text(encoding="utf-8")
            assert "import torch" not in text, file
            assert "from torch" not in text, file


def test_importing_touches_no_accelerator_and_no_optional_library():
    script = (
        "import sys, tokenmerge, torch; assert not torch.cuda.is_initialized();"
        "print([m for m in ('diffusers', 'transformers', 'typer', 'rich', 'matplotlib', 'PIL')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run(script: str) -> str:
    """The output of a script in a separate process."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_needs_no_torch():
    script = (
        "import sys; sys.modules.update(torch=None, diffusers=None)\n"
        "import tokenmerge as t; print(t.ToMeConfig(ratio=0.5).ratio, t.presets.sito(0.4).ratio)\n"
        "from tokenmerge import NothingToMergeError, ViTConfig; print(ViTConfig(r=8).r)"
    )
    assert run(script).split() == ["0.5", "0.4", "8"]


def test_public_names_are_there_when_they_are_asked_for():
    script = (
        "import tokenmerge\n"
        "assert set(tokenmerge.__all__) <= set(dir(tokenmerge))\n"
        "from tokenmerge import *\n"
        "print(apply_patch is tokenmerge.compat.apply_patch, tokenmerge.vit.report.predict_vit.__name__,"
        " hasattr(tokenmerge, 'no_such_name'))"
    )
    assert run(script).split() == ["True", "predict_vit", "False"]


MODULES = ("default_method", "compat", "config", "errors", "presets", "report", "vit")
# Each module is asked for in a child of its own, which has imported nothing but the package and torch.
FORKS = f"""
import os, torch, tokenmerge
for name in {MODULES!r}:
    if os.fork() == 0:
        print(getattr(tokenmerge, name).__name__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_public_modules_are_there_without_an_import_of_their_own():
    assert run(FORKS).split() == [f"tokenmerge.{module}" for module in MODULES]
