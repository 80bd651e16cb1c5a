"""An integer option that is out of range, by a little or by thousands of digits, is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from tokenmerge_tools.cli import main
from tokenmerge_tools.cli.app import app

# Arguments that the commands need besides the option.
NEEDED = {
    "generate": ["a"],
    "tune": ["--speedup", "1.2"],
    "export": ["emoji-unet", "--to", "onnx", "-o", "exported"],
}
COMMANDS: Any = typer.main.get_command(app)
OPTIONS = [
    (name, option.opts[0])
    for name, command in COMMANDS.commands.items()
    for option in command.params
    if option.opts[0].startswith("-")
    and (option.name in ("size", "within") or "int" in str(option.type_descriptor.annotation))
]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenmerge: ")
    assert len(line) < 600


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_options_are_found():
    assert {"--steps", "--seed", "--batch", "--port", "--size"} <= {option for _, option in OPTIONS}


@pytest.mark.parametrize(("command", "option"), OPTIONS)
@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000], ids=["400 digits", "5000 digits"])
def test_thousands_of_digits(command, option, value, capsys):
    if command == "play":
        pytest.importorskip("gradio")
    refused(capsys, command, *NEEDED.get(command, []), f"{option}={value}")


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999999"])
def test_a_port_that_does_not_exist(port, capsys, monkeypatch):
    monkeypatch.setattr("tokenmerge_tools.cli.play.require_gradio", lambda: None)
    assert main(["play", f"--port={port}"]) == 2
    message = f"tokenmerge: port: expected an integer from 1 to 65535, got {port}\n"
    assert capsys.readouterr().err == message


def test_a_setting_of_thousands_of_digits(capsys):
    for setting in ("ratio", "sx", "min_tokens", "reuse.every", "merge_sharing.every", "levels"):
        refused(capsys, "inspect", "--method", "tome", "--set", f"{setting}={'9' * 5000}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["comfyui", "install", "~nobody/x"],
        ["generate", "a", "--model", "~nobody/x/"],
        ["inspect", "~nobody/x.safetensors"],
        ["generate", "a", "--settings", "~nobody/x"],
        ["generate", "a", "--control", "~nobody/x", "--controlnet", "~nobody/y"],
        ["bench", "--grid", "~nobody/x"],
        ["evaluate", "--prompts", "~nobody/x"],
        ["report", "~nobody/x"],
    ],
)
def test_the_home_folder_of_nobody(arguments, capsys):
    refused(capsys, *arguments)
