"""Imports go down only, and importing the package does nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmerge

ROOT = Path(tokenmerge.__file__).parent

# Each part may import those on the lines above it, and its own folder. A line holds parts that never meet.
CORE = [
    ["errors"],
    ["config"],
    ["host_call", "ops", "presets"],
    ["kept", "layout", "when"],
    ["guidance", "merged_call", "methods", "models", "pipeline", "proportional"],
    ["state"],
    ["noting", "planning"],
    ["stacks"],
    ["runtime"],
    ["calibration", "patch"],
    ["counting"],
    ["over_steps"],
    ["report"],
    ["auto", "vit"],
    ["api"],
    ["compat"],
]
TOOLS = [
    ["portable"],
    ["paddle"],
    ["demo", "files", "merging_settings", "metrics", "pictures", "pipeline_methods", "pipeline_settings"],
    ["sizes", "twin"],
    ["loading"],
    ["bench", "options"],
    ["pipeline_call", "reporting", "results"],
    ["evaluate", "generate"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
MAY_NOT = {
    ("state", "models"),
    ("noting", "models"),
    ("planning", "models"),
    ("stacks", "models"),
    ("runtime", "models"),
}


def imports(file: Path) -> set[str]:
    """Parts of the package that a file imports at its top level or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("tokenmerge.")}
    return found


def part(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_imports_go_down_only():
    level = {name: i for i, names in enumerate(CORE + TOOLS) for name in names}
    for file in files():
        here = part(file)
        if here == "__init__":
            continue
        for there in imports(file) - {here}:
            assert level[there] < level[here], f"{file.relative_to(ROOT)} imports tokenmerge.{there}"
            assert (here, there) not in MAY_NOT


def test_the_paddle_room_sees_only_what_needs_no_torch():
    allowed = {"paddle": {"config", "errors", "portable"}, "portable": {"config"}}
    for file in files():
        here = part(file)
        if here in allowed:
            assert imports(file) <= {here} | allowed[here], file
            text = file.read_text(encoding="utf-8")
            assert "import torch" not in text, file
            assert "from torch" not in text, file


def test_of_the_core_only_patch_swaps_classes():
    core = {name for names in CORE for name in names}
    swapping = [part(file) for file in files() if "__class__ =" in file.read_text(encoding="utf-8")]
    assert core.intersection(swapping) == {"patch"}


def test_the_core_needs_torch_alone():
    for file in files():
        if part(file) in {name for names in CORE for name in names}:
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


def test_importing_touches_no_accelerator_and_no_optional_library():
    script = (
        "import sys, tokenmerge, torch; assert not torch.cuda.is_initialized();"
        "print([m for m in ('diffusers', 'transformers', 'typer', 'rich', 'matplotlib', 'PIL')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run(script: str) -> str:
    """What a script prints, in a process of its own."""
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


@pytest.mark.parametrize("module", ["auto", "compat", "config", "errors", "presets", "report", "vit"])
def test_public_modules_are_there_without_an_import_of_their_own(module):
    assert run(f"import tokenmerge; print(tokenmerge.{module}.__name__)") == f"tokenmerge.{module}"
