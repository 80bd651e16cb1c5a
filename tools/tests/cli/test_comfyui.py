from __future__ import annotations

import subprocess
import sys

import pytest

from tokenmerge.integrations.comfyui import install
from tokenmerge_tools.cli import main


def test_install_says_what_it_wrote(tmp_path, capsys):
    (tmp_path / "custom_nodes").mkdir()
    assert main(["comfyui", "install", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    files = [file for file in (tmp_path / "custom_nodes").rglob("*") if file.is_file()]
    assert len(files) == 5
    assert all(f"wrote {file}" in printed for file in files)


def test_a_folder_of_something_else_is_one_line(tmp_path, capsys):
    assert main(["comfyui", "install", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "custom_nodes" in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.slow
def test_the_node_loads_without_diffusers_and_comfyui():
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('diffusers', 'transformers', 'comfy', 'typer')))\n"
        "from tokenmerge.integrations.comfyui.custom_node import NODE_CLASS_MAPPINGS as nodes; print(*nodes)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "TokenMerging"


def test_the_library_alone_installs_the_node(tmp_path, capsys):
    """ComfyUI's Python need not have the command line."""
    (tmp_path / "custom_nodes").mkdir()
    assert install.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("wrote ") == 5
    assert install.main([str(tmp_path / "nothing")]) == install.main([]) == 2
    assert "custom_nodes" in capsys.readouterr().err
