from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import tiny_pipeline
import torch
from tools.tests.small_files import small_files

import tokenmerge
import tokenmerge_tools.bench.loaded_model
import tokenmerge_tools.generate.run
import tokenmerge_tools.pipelines.call
from tokenmerge import MergeSharing, presets
from tokenmerge.config import ToMeConfig, save_config
from tokenmerge.plans import pays_from
from tokenmerge.report import predict
from tokenmerge_tools.cli import main, terminal
from tokenmerge_tools.drawing import Progress
from tokenmerge_tools.pipelines.loading import find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch

RUN = "from tokenmerge_tools.cli import main; raise SystemExit(main())"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """More threads make a model this small slower, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A device on which merging saves time on every grid; here a tiny one need not."""
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(4))


def refused(capsys, *arguments, said=""):
    """The one line that the command prints to stderr. ``said`` begins the line that it has printed before."""
    assert main(list(map(str, arguments))) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == bool(said)
    assert printed.out.startswith(said)
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    return lines[0].removeprefix("tokenmerge: ")


# --- the commands ---------------------------------------------------------------------------------


def test_generate_says_in_about_ten_lines_what_it_drew_and_writes_a_folder(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["generate", "a red apple", "--model", folder, "--steps", 2, "--repeat", 1, "--out", out]
    arguments += ["--method", "tome"]
    assert (
        main(
            [
                *map(str, arguments),
                "--ratio",
                "0.25",
                "--seed",
                "7",
                "--set",
                "seed=none",
                "--set",
                "max_downsample=2",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    side = tiny_pipeline.SIDE
    assert lines[:2] == [
        f'Drawing "a red apple", {side} × {side} pixels, 2 steps, with {folder}',
        f"Compare them: {out / 'comparison.png'}",
    ]
    text = "\n".join(lines)
    for words in (
        "  dense, 2 steps ",
        "  with tokenmerge ",
        "×  ",
        "dB to dense: ",
        " every step was full",
        "tokens merged to",
        "Seconds of one run each; --repeat 3 makes them reliable.",
        "More:        --details",
    ):
        assert words in text
    assert len(lines) <= 15
    assert (out / "comparison.png").is_file()
    conditions = json.loads((out / "run.json").read_text())["conditions"]
    chosen = conditions["options"]
    changes = {"ratio": 0.25, "max_downsample": 2, "seed": None}
    assert chosen["merging"] == {"method": "tome", **changes, "seed": "none"}
    assert conditions["config"] == json.loads(json.dumps(ToMeConfig(**changes).to_dict()))
    assert (chosen["prompt"], chosen["steps"], chosen["seed"], chosen["repeat"]) == ("a red apple", 2, 7, 1)


def test_details_are_times_memory_and_what_the_patch_says(folder, tmp_path, capsys):
    arguments = ["generate", "a red apple", "--model", folder, "--steps", 2, "--repeat", 2, "--out", tmp_path]
    assert main([*map(str, arguments), "--method", "tome", "--details"]) == 0
    printed = capsys.readouterr().out
    said = printed[printed.index("StableDiffusionPipeline, ") :].splitlines()
    for line, name in zip(said[1:3], ("dense", "tokenmerge"), strict=True):
        assert re.match(rf"{name}: [\d.]+ m?s per image \([\d.]+ m?s to [\d.]+ m?s\), peak memory", line)
    assert "tokenmerge in UNet2DConditionModel: " in printed
    assert "memory: peak resident memory" in printed


def test_settings_of_a_file_are_named_by_the_file(folder, tmp_path, capsys):
    """Their values fill three lines, and the user gave none of them."""
    file = tmp_path / "tuned.json"
    save_config(ToMeConfig(ratio=0.25, planner="tiled", rules=[{"level": 2, "ratio": 0.1}]), file)
    common = ["generate", "a red apple", "--model", folder, "--steps", 2, "--repeat", 1]
    assert main([*map(str, common), "--settings", str(file), "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert f"tokenmerge.apply_token_merging(pipe, {str(file)!r})" in printed
    assert "rules" not in printed
    assert "planner=" not in printed


def test_progress_is_printed_without_a_terminal_too(capsys):
    now = [0]
    move = terminal._in_lines("steps", lambda: now[0])
    for now[0], done in ((1, 1), (31, 2), (60, 3), (60, 4)):
        move(Progress("dense", done, 4))
    assert capsys.readouterr().err == "dense: 2 of 4 steps done\ndense: 4 of 4 steps done\n"


def test_every_option_of_generate_reaches_the_options(monkeypatch, folder):
    seen = []

    def stop(options, *listeners):
        seen.append(options)
        raise KeyboardInterrupt

    # `tokenmerge_tools.cli.generate` names the command, not its module.
    monkeypatch.setattr(import_module("tokenmerge_tools.cli.generate"), "run_generate", stop)
    arguments = (
        "generate x --model m --out o --method tomesd --ratio 0.1 --set merge_mlp "
        "--set scope=block --set seed=none --size 64x32 "
        "--steps 3 --seed 4 --batch 5 --scheduler ddim "
        "--negative-prompt n --guidance 2.5 --control c.png --controlnet cn --dtype bf16 --device cpu "
        "--attention default --no-compare --repeat 6"
    )
    assert main(arguments.split()) == 130
    (options,) = seen
    assert options.to_dict() == {
        "prompt": "x",
        "model": "m",
        "out": "o",
        "merging": {
            "method": "tomesd",
            "ratio": 0.1,
            "merge_mlp": True,
            "scope": "block",
            "seed": "none",
        },
        "size": (64, 32),
        "steps": 3,
        "seed": 4,
        "batch": 5,
        "scheduler": "ddim",
        "negative_prompt": "n",
        "guidance": 2.5,
        "control": "c.png",
        "controlnet": "cn",
        "dtype": "bf16",
        "device": "cpu",
        "attention": "default",
        "compare": False,
        "repeat": 6,
        "record_steps": False,
        "min_psnr": None,
    }


def test_generate_prints_and_draws_the_steps_that_it_recorded(folder, tmp_path, capsys):
    arguments = ["generate", "a red apple", "--model", folder, "--steps", 2, "--repeat", 1, "--out", tmp_path]
    assert main([*map(str, arguments), "--method", "tome", "--record-steps", "--no-compare"]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.rindex("2 steps, ") :].splitlines()
    assert re.search(r" s in the model; in each, \d calls of blocks merge 256 → 128 tokens$", table[0])
    assert [line.split()[0] for line in table[1:4]] == ["step", "0", "1"]


def test_inspect_prints_the_report_and_cuts_nothing(folder, capsys):
    assert main(["inspect", str(folder), "--method", "tome", "--size", "64x32", "--ratio", "0.5"]) == 0
    printed = capsys.readouterr().out
    for cell in (
        "up_blocks.1.attentions.1.transformer_blocks.0",
        "16 × 32",
        "512 → 256",
        "self-attention",
        "whole model",
        "note: 4 blocks do not merge at level 2",
    ):
        assert cell in printed
    assert "…" not in printed


@pytest.mark.usefixtures("uncounted")
def test_without_a_method_it_is_auto_or_merging_alone(folder, capsys):
    assert main(["inspect", str(folder), "--speedup", "1.5", "--steps", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "auto"
    assert main(["inspect", str(folder), "--ratio", "0.4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = found["merging"]
    assert (found["method"], settings["ratio"], settings["reuse"]["every"]) == ("tome", 0.4, 1)


def test_inspect_as_json_is_the_report(folder, capsys):
    assert (
        main(["inspect", str(folder), "--method", "tome", "--set", "merge_mlp", "--batch", "4", "--json"])
        == 0
    )
    config = ToMeConfig(merge_mlp=True)
    report = predict(load_sketch(find_model(str(folder))).denoiser, config, 16, 16, batch=4)
    told = {"method": "tome", "merging": config.to_dict(), **report.to_dict(), "scale": tiny_pipeline.SCALE}
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(told))


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ((), presets.toma()),
        (("--ratio", "0.25", "--set", "max_downsample=2"), presets.toma(0.25, max_downsample=2)),
        (
            ("--set", "merge_mlp=false", "--set", "merge_crossattn=false"),
            presets.toma(merge_mlp=False, merge_crossattn=False),
        ),
        (
            ("--set", "merge_sharing.every=2", "--set", "merge_sharing.blocks=false"),
            presets.toma(merge_sharing=MergeSharing(every=2, blocks=False)),
        ),
        (
            ("--set", 'rules=[{"level": 2, "ratio": 0.25}, {"start": 0.5, "combine": "keep"}]'),
            presets.toma(rules=[{"level": 2, "ratio": 0.25}, {"start": 0.5, "combine": "keep"}]),
        ),
        (
            ("--set", "seed=none"),
            presets.toma(seed=None),
        ),
    ],
)
@pytest.mark.usefixtures("uncounted")
def test_a_method_keeps_what_the_options_leave_out(options, config, folder, capsys):
    assert main(["inspect", str(folder), "--method", "toma", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "toma"
    assert found["merging"] == json.loads(json.dumps(config.to_dict()))


def test_inspect_counts_the_mean_over_steps(folder, capsys):
    arguments = ["inspect", str(folder), "--set", 'rules=[{"start": 0.5, "ratio": 0}]']
    assert main([*arguments, "--steps", "4"]) == 0
    assert "mean over 4 steps" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "mean over 50 steps" in capsys.readouterr().out  # as many as the pipeline takes by itself


def test_env_prints_versions_and_back_ends(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for word in ("tokenmerge", torch.__version__, "threads", "cpu", "sdpa", "xformers"):
        assert word in printed
    assert json.loads(printed)["versions"]["torch"] == torch.__version__


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == tokenmerge.__version__


@pytest.mark.parametrize("command", ["generate", "inspect", "env"])
def test_help_has_examples(command, capsys):
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Examples:" in printed
    assert f"• tokenmerge {command}" in printed


def test_without_arguments_the_commands_are_listed(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("generate", "inspect", "env"))


# --- errors: one line, exit code 2 ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], 'What to draw, such as "a red apple"'),
        (["generate", ""], "prompt: it is empty"),
        (["generate", "x", "--ratio", "abc"], "'--ratio': expected a number, got 'abc'"),
        (
            ["generate", "x", "--ratio", "nan"],
            "ratio: expected a number from 0 to 1 − 1/(sx·sy), 0.75 for 2 × 2 cells, got nan",
        ),
        (["generate", "x", "--ratio", "0.9"], "got 0.9"),
        (
            ["generate", "x", "--ratio", "2"],
            "ratio: expected 0 to 0.75, got 2; for a speed, give --speedup 2",
        ),
        (["generate", "x", "--steps", "2.5"], "'--steps': expected an integer, got '2.5'"),
        (["generate", "x", "--size", "nan"], "size: expected WIDTHxHEIGHT or one number"),
        (["generate", "x", "--model", "nothing"], "model: 'nothing' is not a model"),
        (["generate", "x", "--model", "./nope"], "model: there is no folder ./nope; expected"),
        (
            ["generate", "x", "--settings", "no.json"],
            "cannot read settings (No such file or directory); pass",
        ),
        (["export", "emoji-unet", "--out", "x"], "Missing option '--to': onnx, openvino."),
        (["play", "--port", "99999999"], "port: expected an integer from 1 to 65535, got 99999999"),
        (["generate", "x", "--speed"], "No such option: --speed"),
        (["inspect", "--size", "0"], "size: expected WIDTHxHEIGHT or one number"),
        (["inspect", "nothing"], "model: 'nothing' is not a model"),
        (["inspect", "--steps", "0"], "steps: expected an integer ≥ 1 and ≤ 5,000, got 0"),
        (["inspect", "--method", "tomato"], "method: expected one of auto, tome, "),
        (["inspect", "--set", "speed=2"], "set: expected settings out of ratio, max_downsample"),
        (["inspect", "--set", "sx=wide"], "set: sx: expected sx=INTEGER, got 'sx=wide'"),
        (["inspect", "--set", "sx"], "sx: expected sx=INTEGER"),
        (["inspect", "--set", "proportional=maybe"], "expected proportional=true or false"),
        (["inspect", "--set", "rules=2"], "rules=JSON such as"),
        (["inspect", "--set", "rules={"], "rules=JSON such as"),
        (["inspect", "--set", 'rules=[{"level": 2, "spacing": 0.5}]'], "cannot change spacing"),
        (
            ["inspect", "--set", "merge_sharing.every=0"],
            "merge_sharing.every: expected an integer ≥ 1, got 0",
        ),
        (
            ["inspect", "--method", "tome", "--set", "reuse.shallow_every=2"],
            "reuse.shallow_every: expected 1 to reuse.every=1",
        ),
        (["inspect", "--method", "tomes"], "got 'tomes'; did you mean 'tomesd'?"),
        (["inspect", "--set", "reuse.evry=2"], "got 'reuse.evry'; did you mean 'reuse.every'?"),
        (["inspect", "--set", "reuse.span=0.5"], "take reuse.full_steps instead of reuse.span"),
        (["env", "--json"], "No such option: --json"),
        (["evaluate", "--save-grid", "a.png"], "No such option: --save-grid"),
        (["tune", "--min-glyphs", "1"], "No such option: --min-glyphs"),
        (["inspect", "--set", "sx=3", "--set", "sx=4"], "set: sx is given twice, as 3 and as 4"),
        (["inspect", "--sx", "3"], "No such option: --sx; write --set sx=VALUE."),
        (["inspect", "--no-merge-attn"], "No such option: --no-merge-attn; write --set merge_attn=false."),
        (["generate", "x", "--compile"], "No such option: --compile"),
        (["paint"], "No such command 'paint'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert message in refused(capsys, *arguments)


def test_usage_errors_point_to_the_help(capsys):
    assert refused(capsys, "inspect", "--speed").endswith("See: tokenmerge inspect --help")


def test_a_folder_without_an_index_is_one_line(tmp_path, capsys):
    for command in (["generate", "x", "--model", tmp_path], ["inspect", tmp_path]):
        assert "no model_index.json" in refused(capsys, *command)


def test_an_output_folder_that_cannot_be_written_is_one_line(folder, tmp_path, capsys):
    (tmp_path / "file").touch()
    line = refused(capsys, "generate", "x", "--model", folder, "--out", tmp_path / "file" / "out")
    assert "out: cannot write to" in line


def test_a_full_disk_is_one_line(folder, tmp_path, capsys):
    arguments = ("--out", tmp_path, "--steps", 1, "--method", "tome")
    with small_files(200):
        line = refused(capsys, "generate", "x", "--model", folder, *arguments, said='Drawing "x"')
    assert f"out: cannot write {tmp_path}" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_output_that_cannot_be_printed_is_one_line():
    for command in ("env", "inspect"):
        with Path("/dev/full").open("w") as full:
            ran = subprocess.run(
                [sys.executable, "-c", RUN, command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert ran.returncode == 2
        assert "No space left on device" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--model", "geometry:sd15", "--device", "cpu", "-o", "/dev/full"),
        ("evaluate", "--prompts", "/dev/zero"),
        ("generate", "x", "--out", "/dev/full"),
        ("generate", "x", "--control", "/dev/zero", "--controlnet", "x/y"),
        ("report", "/dev/zero"),
    ],
)
def test_devices_are_neither_read_nor_written(arguments, capsys):
    assert "/dev/" in refused(capsys, *arguments)


def test_where_nothing_merges_the_line_says_what_to_set(folder, tmp_path, capsys):
    tiny = ("--size", 8, "--method", "tome", "--set", "min_tokens=17")  # on a grid of 4 × 4 tokens
    assert "larger image" in refused(capsys, "inspect", folder, *tiny)
    line = refused(capsys, "generate", "x", "--model", folder, "--out", tmp_path, *tiny)
    assert "larger image" in line


def test_a_stride_larger_than_the_grid_is_one_line(folder, capsys):
    assert "sx" in refused(capsys, "inspect", folder, "--set", "sx=99", "--method", "tome")


def test_a_missing_extra_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert 'pip install "diffusers"' in refused(capsys, "inspect")


@pytest.fixture(
    params=[
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nMore lines"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you …"),
    ],
    ids=["device", "Python", "CPU"],
)
def no_memory(request):
    def fail(*args, **kwargs):
        raise request.param

    return fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "loader"),
    [
        (("generate", "x", "--out", "{tmp}"), "tokenmerge_tools.pipelines.call.load_pipeline"),
        (("evaluate", "--out", "{tmp}/a.jsonl"), "tokenmerge_tools.pipelines.call.load_pipeline"),
        (
            ("bench", "--model", "{folder}", "--out", "{tmp}/a.jsonl"),
            "tokenmerge_tools.bench.loaded_model.load_sketch",
        ),
        (("inspect",), "tokenmerge_tools.cli.inspect:load_sketch"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_too_little_memory_for_the_weights_is_one_line(
    command, loader, no_memory, folder, tmp_path, capsys, monkeypatch
):
    module, _, name = loader.replace(":", ".").rpartition(".")
    monkeypatch.setattr(import_module(module), name, no_memory)
    line = refused(capsys, *(word.format(tmp=tmp_path, folder=folder) for word in command))
    assert line.startswith("out of memory")
    assert "smaller size, batch or model" in line


def test_too_little_memory_for_the_weights_is_a_cell_of_bench(
    no_memory, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(tokenmerge_tools.bench.loaded_model, "load_pipeline", no_memory)
    out = tmp_path / "a.jsonl"
    arguments = ["--model", str(folder), "--device", "cpu", "--out", str(out)]
    assert main(["bench", *arguments]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["status"] for record in records} == {"oom"}
    progress = capsys.readouterr().err.splitlines()
    assert len(progress) == len(records) + 1  # a line for each cell, and where the results are
    assert all(": oom: " in line for line in progress[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", [("generate", "x", "--method", "tome"), ("evaluate", "--limit", 1)])
def test_too_little_memory_for_a_picture_is_one_line(
    command, no_memory, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(tokenmerge_tools.pipelines.call.PipelineCall, "__call__", no_memory)
    (tmp_path / "prompts.txt").write_text("a boat\n")
    prompts = ("--prompts", tmp_path / "prompts.txt") if command[0] == "evaluate" else ()
    out = tmp_path / ("a.jsonl" if prompts else "pictures")
    arguments = [*command, "--model", folder, *prompts, "--out", out, "--steps", 1]
    assert main(list(map(str, arguments))) == 2
    printed = capsys.readouterr()
    assert printed.out.count("\n") == (command[0] == "generate")  # what it draws
    (line,) = printed.err.splitlines()
    assert "memory" in line
    assert "lower --" in line


def test_a_terminal_without_the_characters_still_gets_the_table(folder, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["inspect", str(folder), "--method", "tome"]) == 0
    terminal.flush()
    assert b"256 ? 128" in terminal.buffer.getvalue()


def test_an_interrupted_run_without_results_says_of_none_that_they_are_kept(
    folder, tmp_path, capsys, monkeypatch
):
    def press_ctrl_c(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenmerge_tools.generate.run, "load_pipeline_for", press_ctrl_c)
    out = tmp_path / "new" / "pictures"
    assert main(["generate", "x", "--model", str(folder), "--out", str(out)]) == 130
    assert capsys.readouterr().err == "tokenmerge: interrupted\n"
    assert list(tmp_path.iterdir()) == []  # nothing was drawn, so no folder is left


def test_a_folder_that_was_there_stays(folder, tmp_path, monkeypatch):
    def press_ctrl_c(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenmerge_tools.generate.run, "load_pipeline_for", press_ctrl_c)
    (tmp_path / "mine").write_text("kept")
    assert main(["generate", "x", "--model", str(folder), "--out", str(tmp_path)]) == 130
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_size_that_the_pipeline_refuses_is_refused_before_the_model_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokenmerge_tools.generate.run, "load_pipeline_for", None)
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "generate", "x", "--size", 100)
    assert line == "size: this model needs multiples of 8 pixels, got 100x100; use 96x96"
    (tmp_path / "prompts.txt").write_text("a boat\n")
    assert refused(capsys, "evaluate", "--prompts", "prompts.txt", "--size", 100) == line
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.txt"]


def test_a_terminal_gets_a_line_before_the_libraries_load():
    code = """
import io, sys
from tokenmerge_tools.cli import main

class Terminal(io.StringIO):
    def isatty(self):
        return True

    def write(self, text):
        raise SystemExit(f"{text} {'torch' in sys.modules}")

sys.stderr = Terminal()
try:
    main(["generate", "x"])
except SystemExit as said:
    print(said)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "Loading PyTorch and diffusers … False\n"


def test_ctrl_c_ends_with_130_and_keeps_what_is_there(folder, tmp_path, capsys, monkeypatch):
    original, rounds = tokenmerge_tools.drawing.interleaved, []

    def press_ctrl_c(*args):
        rounds.append(args)
        if len(rounds) == 2:  # the first one draws the images
            signal.raise_signal(signal.SIGINT)
        yield from original(*args)

    monkeypatch.setattr(tokenmerge_tools.drawing, "interleaved", press_ctrl_c)
    # Shells start background processes with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        arguments = ["--out", str(tmp_path), "--steps", "1", "--method", "tome", "--repeat", "2"]
        assert main(["generate", "x", "--model", str(folder), *arguments]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "tokenmerge: interrupted; finished results are kept"
    assert printed.out.splitlines() == [
        f'Drawing "x", 32 × 32 pixels, 1 steps, with {folder}',
        f"Compare them: {tmp_path / 'comparison.png'}",
    ]
    assert (tmp_path / "comparison.png").is_file()
    assert json.loads((tmp_path / "run.json").read_text())["complete"] is False


def test_a_shell_completes_commands(capsys, monkeypatch):
    """The program answers the questions of bash's completion script."""
    asked = {"COMP_WORDS": "tokenmerge ge", "COMP_CWORD": "1", "_TOKENMERGE_COMPLETE": "complete_bash"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["generate"]


def test_a_warning_is_one_line_and_is_shown_once(folder, tmp_path, capsys):
    """The untimed call and both timed ones could warn."""
    before = warnings.showwarning
    arguments = ["generate", "a red apple", "--model", folder, "--steps", 2, "--repeat", 2, "--out", tmp_path]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = before
        assert (
            main([*map(str, arguments), "--method", "tome", "--set", 'rules=[{"start": 0.1, "ratio": 0}]'])
            == 0
        )
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line.lower()]
    assert lines == [
        "tokenmerge: warning: this generation is dense: by the rules {'start': 0.1, 'ratio': 0.0}, "
        "nothing merges in any of 2 steps; leave more steps between their start and until, "
        "or take more steps"
    ]
    assert warnings.showwarning is before


def test_a_warning_of_another_package_is_shown_as_usual(monkeypatch):
    shown = []

    def warn(arguments):
        warnings.warn_explicit("soon", UserWarning, "other.py", 1)
        return 0

    monkeypatch.setattr("tokenmerge_tools.cli.app.run", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest, **named: shown.append(str(message))
        assert main([]) == 0
    assert shown == ["soon"]
