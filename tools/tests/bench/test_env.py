from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import tokenmerge
from tokenmerge_tools.machine import environment


def test_versions_threads_and_devices_are_those_of_this_process():
    found = environment()
    assert found["versions"]["tokenmerge"] == tokenmerge.__version__
    assert found["versions"]["diffusers"] == metadata.version("diffusers")
    assert found["threads"] == torch.get_num_threads()
    assert found["devices"][0]["device"] == "cpu"
    assert "math" in found["attention"]["sdpa"]


def test_what_is_not_installed_is_none(monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    found = environment()
    assert found["versions"]["diffusers"] is None
    assert found["attention"]["xformers"] is None


@pytest.mark.slow
def test_it_is_json_and_imports_no_optional_library():
    script = (
        "import json, sys\n"
        "from tokenmerge_tools.machine import environment\n"
        "print(json.dumps(environment()))\n"
        "assert not {'diffusers', 'transformers', 'rich', 'typer', 'PIL'} & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["versions"]["python"] == environment()["versions"]["python"]
