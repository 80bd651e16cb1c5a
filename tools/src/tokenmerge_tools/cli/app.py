"""The typer application with all commands of ``tokenmerge``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import tokenmerge
from tokenmerge.config import SETTINGS
from tokenmerge.errors import ConfigError
from tokenmerge.integrations.comfyui import install as folder
from tokenmerge_tools.cli.bench import bench
from tokenmerge_tools.cli.evaluate import evaluate
from tokenmerge_tools.cli.export import export
from tokenmerge_tools.cli.generate import generate
from tokenmerge_tools.cli.inspect import inspect
from tokenmerge_tools.cli.play import play
from tokenmerge_tools.cli.report import report
from tokenmerge_tools.cli.tune import tune
from tokenmerge_tools.machine import environment

# typer makes this class public only through its subclass.
_UsageError: Any = typer.BadParameter.__bases__[0]

# The exit code that typer gives for Ctrl-C.
_INTERRUPTED = 130


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"- `tokenmerge {line}`" for line in lines)


def env() -> None:
    """Print versions, devices, threads and attention back-ends of this machine as JSON."""
    print(json.dumps(environment(), indent=2))


_comfyui = typer.Typer(help="Install the node “Token Merging” for ComfyUI.", rich_markup_mode="markdown")


@_comfyui.callback()
def comfyui() -> None:
    """Install the node “Token Merging” for ComfyUI."""


@_comfyui.command()
def install(
    path: Annotated[str, typer.Argument(help="ComfyUI's folder, or its folder custom_nodes.")],
) -> None:
    """Write the node into ComfyUI's custom_nodes, and say what was written."""
    files = folder.install(path)
    for file in files:
        print(f"wrote {file}")
    print(folder.AFTERWARDS)


app = typer.Typer(
    help="Faster diffusion models without training, by token merging and step reuse.",
    epilog=_examples("generate 'a red apple'", "inspect --size 256", "env"),
    rich_markup_mode="markdown",
)
_COMMANDS: dict[Any, tuple[str, ...]] = {
    generate: (
        "generate 'a red apple'",
        "generate 'a castle' --model owner/name --size 768x512",
        "generate 'a castle' --model ./sdxl --speedup 2",
        "generate 'a castle' --method toma --ratio 0.6",
        "generate 'a castle' --control edges.png --controlnet ./canny",
    ),
    inspect: (
        "inspect",
        "inspect owner/name --size 768x512 --steps 30 --guidance 5 --speedup 2",
        "inspect ./sdxl --json",
        "inspect --method sdtm --steps 25",
    ),
    bench: (
        "bench --size 512 --size 768 --speedup 2",
        "bench --model owner/name --variant tome --variant todo",
        "bench --variant todo --variant toma:ratio=0.6 --variant tome:scope=block,reuse.every=2",
        "bench --preset paper --dtype fp32",
        "bench --grid my-grid.toml -o results.jsonl",
    ),
    evaluate: (
        "evaluate --limit 20 --speedup 1.5 --speedup 2",
        "evaluate --model owner/name --prompts PartiPrompts.tsv --metric dino --metric clip-score",
        "evaluate --model owner/name --prompts prompts.txt --metric lpips --metric clip=./my-clip",
        "evaluate --preset drawbench --model FLUX.1-dev --steps 50 --dtype bf16 --dry-run",
        "evaluate --model owner/name --prompts classes.txt --metric fid --reference ./imagenet-val",
    ),
    tune: (
        "tune --min-psnr 35 --size 256 --steps 20",
        "tune --model owner/name --prompts prompts.txt --speedup 2",
        "generate 'a castle' --settings outputs/tuned.json",
    ),
    export: (
        "export emoji-unet --to onnx -o exported",
        "export owner/name --to openvino --size 768 --ratio 0.6 -o exported",
        "export ./lcm --to openvino --guidance 1 --ratio 0 -o exported",
    ),
    report: ("report outputs/bench.jsonl -o report.html",),
    play: ("play", "play --model owner/name --device cuda"),
    env: ("env",),
}
for _command, _lines in _COMMANDS.items():
    app.command(epilog=_examples(*_lines))(_command)
app.add_typer(_comfyui, name="comfyui", epilog=_examples("comfyui install ~/ComfyUI"))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(tokenmerge.__version__)
        raise typer.Exit


@app.callback()
def _tokenmerge(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def _setting_of(option: str) -> str:
    """Return the text after ``--set`` that stands for an option, or an empty text if it is no setting.

    >>> _setting_of("--sx"), _setting_of("--no-merge-attn"), _setting_of("--speed")
    ('sx=VALUE', 'merge_attn=false', '')
    """
    name = option.lstrip("-").replace("-", "_")
    setting = name.removeprefix("no_")
    if setting not in SETTINGS:
        return ""
    return f"{setting}=false" if name.startswith("no_") else f"{setting}=VALUE"


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code. A wrong option is a ConfigError."""
    command = typer.main.get_command(app)
    try:
        code: int | None = command.main(
            list(arguments) or ["--help"], prog_name="tokenmerge", standalone_mode=False
        )
    except _UsageError as error:
        place = error.ctx.command_path if error.ctx else "tokenmerge"
        message = error.format_message()
        if message.startswith("Missing") and (wanted := getattr(error.param, "help", None)):
            message = f"{message.rstrip('.')}: {wanted}"
        if setting := _setting_of(getattr(error, "option_name", "")):
            message = f"No such option: {error.option_name}; write --set {setting}."
        raise ConfigError(f"{message} See: {place} --help") from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    return code or 0
