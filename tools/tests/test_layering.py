"""The tools use the library by its public modules, and their own imports go down only."""

import ast
from pathlib import Path

import tokenmerge
import tokenmerge_tools

ROOT = Path(tokenmerge_tools.__file__).parent

# What tools may import of the library: the modules of its public face, and the facts about models.
PUBLIC = (
    *(
        "api",
        "config",
        "default_method",
        "errors",
        "handle",
        "images",
        "models",
        "ops",
        "plans",
        "presets",
        "report",
    ),
    "integrations.comfyui.install",
)
# What each part imports of the parts above it, no more and no less.
MAY_IMPORT = {
    "files": "",
    "failures": "",
    "machine": "",
    "timing": "",
    "method_spec": "",
    "closeness": "",
    "sheets": "",
    "demo": "",
    "pipelines": "files failures method_spec demo",
    "records": "files",
    "variants": "method_spec pipelines records",
    "drawing": "failures timing pipelines variants",
    "bench": "files failures machine timing method_spec pipelines records variants",
    "reporting": "files records variants",
    "generate": "files failures machine timing closeness sheets pipelines variants drawing",
    "evaluate": "files failures machine closeness sheets demo pipelines records variants drawing",
    "tune": "files failures pipelines records variants drawing reporting evaluate sheets",
    "play": "failures method_spec closeness sheets demo pipelines variants drawing",
    "export": "files failures machine method_spec pipelines",
    "cli": (
        "files failures machine method_spec demo pipelines records drawing bench reporting generate "
        "evaluate tune play export"
    ),
    "__main__": "cli",
}


def imports(file: Path, package: str) -> set[str]:
    """Return the modules of a package that a file imports, at its top level or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}
    return found


def part(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").parts[0]


def files() -> list[Path]:
    return [file for file in sorted(ROOT.rglob("*.py")) if part(file) != "__init__"]


def test_tools_use_public_modules_only():
    for file in files():
        for name in imports(file, "tokenmerge"):
            assert name == "__version__" or name.startswith(PUBLIC), (
                f"{file.relative_to(ROOT)} imports {name}"
            )


def test_the_library_knows_no_tools():
    for file in Path(tokenmerge.__file__).parent.rglob("*.py"):
        assert not imports(file, "tokenmerge_tools"), file


def test_imports_go_down_only():
    parts = list(MAY_IMPORT)
    assert {part(file) for file in files()} == set(parts)
    for i, (here, allowed) in enumerate(MAY_IMPORT.items()):
        assert set(allowed.split()) <= set(parts[:i]), f"{here} may import only parts above its line"
    found: dict[str, set[str]] = {here: set() for here in parts}
    for file in files():
        found[part(file)] |= {name.split(".")[0] for name in imports(file, "tokenmerge_tools")} - {part(file)}
    assert {here: set(allowed.split()) for here, allowed in MAY_IMPORT.items()} == found


def test_both_distributions_have_the_same_version():
    assert tokenmerge_tools.__version__ == tokenmerge.__version__
