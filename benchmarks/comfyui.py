"""Closeness and time of this package's ComfyUI node, ComfyUI's own node, and fewer steps.

Images of the bundled models are sampled by ComfyUI's own code with PyTorch's fused attention: dense, with
the node Token Merging and method `auto`, with `TomePatchModel`, and dense with as many steps as fit into the
time of each `auto`. The methods are interleaved at each prompt. A line of the record is one image: PSNR to
the dense image of the same seed, and wall and CPU seconds of the sampling. A second run with the same
record continues where the first one stopped. `--table` prints the record as a table, which `--write` puts
into docs/comfyui.md.

Run it in the environment of `make test-comfyui`, on a machine that does nothing else:

    .venv-comfyui/bin/python benchmarks/comfyui.py --out benchmarks/comfyui_cpu.jsonl
    .venv-comfyui/bin/python benchmarks/comfyui.py --write --out benchmarks/comfyui_cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/integrations/comfyui"))

import comfy_code

comfy_code.use("--use-pytorch-cross-attention")  # fused; by default, ComfyUI takes a slower one on a CPU

import comfy.sample  # noqa: E402
import emoji_nodes  # noqa: E402
from comfy_extras.nodes_tomesd import TomePatchModel  # noqa: E402

from tokenmerge.integrations.comfyui.nodes import TokenMerging  # noqa: E402
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs  # noqa: E402

MODELS = {"emoji-unet": (3.0, 7.5), "emoji-mmdit": (3.0, 7.0)}
SCHEDULER = "simple"
STEPS = 20
SIZE = 256
SPEEDUPS = (1.5, 2.0, 3.0)
DENSE = "dense"
OWN = "TomePatchModel 0.5"
FEWER = "fewer steps as "
PAGE = Path(__file__).parents[1] / "docs" / "comfyui.md"
TABLE = Path(__file__).parent / "results" / "comfyui.md"
KEY = ("model", "guidance", "prompt", "method")


def patched(model: Any, method: str) -> Any:
    """Return the model, patched with the method of this name."""
    name, _, number = method.partition(" ")
    if name == "auto":
        return TokenMerging().merge(model, method="auto", speedup=float(number))[0]
    if method == OWN:
        return TomePatchModel.execute(model, float(number)).args[0]
    return model


def sample(row: Mapping[str, Any], method: str, steps: int) -> tuple[torch.Tensor, list[float]]:
    """Return the image ``[1, size, size, 3]``, from 0 to 1, with the seconds that sampling took."""
    model, positive, negative = emoji_nodes.EmojiModel().load(row["model"], row["prompt"])
    channels = model.model.latent_format.latent_channels
    latent = torch.zeros(1, channels, SIZE // 4, SIZE // 4)
    noise = comfy.sample.prepare_noise(latent, row["seed"])
    model = patched(model, method)
    start = time.perf_counter()
    cpu_start = time.process_time()
    found = comfy.sample.sample(
        *(model, noise, steps, row["guidance"], "euler", SCHEDULER, positive, negative, latent),
        seed=row["seed"],
        disable_pbar=True,
    )
    taken = [round(time.perf_counter() - start, 3), round(time.process_time() - cpu_start, 3)]
    return emoji_nodes.EmojiDecode().decode(row["model"], {"samples": found})[0], taken


def methods(model: str, spent: Mapping[str, float]) -> Iterator[tuple[str, str, int]]:
    """Yield the name in the record, the method and the number of steps.

    Fewer steps come last, since they need the times of auto.
    """
    for ratio in SPEEDUPS:
        yield f"auto {ratio:g}", f"auto {ratio:g}", STEPS
    if model == "emoji-unet":  # ComfyUI's node supports only UNets
        yield OWN, OWN, STEPS
    for ratio in SPEEDUPS:
        share = spent[f"auto {ratio:g}"] / spent[DENSE]
        yield f"{FEWER}auto {ratio:g}", DENSE, max(1, min(STEPS - 1, round(share * STEPS)))


def draw_row(row: dict[str, Any], out: Path) -> None:
    """Draw one prompt with each method, and write a line for each image."""
    sample(row, DENSE, 2)
    dense, taken = sample(row, DENSE, STEPS)
    spent = {DENSE: taken[0]}
    lines = [{**row, "method": DENSE, "used": STEPS, "psnr": None, "taken": taken}]
    for label, method, steps in methods(row["model"], spent):
        picture, taken = sample(row, method, steps)
        spent[label] = taken[0]
        error = float(((picture - dense) ** 2).mean())
        psnr = round(-10 * float(torch.tensor(error).log10()), 3)
        lines.append({**row, "method": label, "used": steps, "psnr": psnr, "taken": taken})
        print(
            f"{row['model']}, {row['guidance']:g}: {label} {psnr:.1f} dB, {taken[0]:.1f} s", file=sys.stderr
        )
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def run(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    glyphs = read_glyphs()
    chosen = choose_prompts(options.prompts, seed=17)
    done = {key(line) for line in read(options.out)}
    for number, (glyph, background) in enumerate(chosen):
        for model, scales in MODELS.items():
            for guidance in scales:
                row = {
                    **{"model": model, "guidance": guidance, "size": SIZE, "steps": STEPS},
                    **{"prompt": caption(glyphs[glyph].name, background), "seed": 9000 + number},
                    **{"threads": torch.get_num_threads(), "torch": torch.__version__},
                }
                if key({**row, "method": DENSE}) not in done:
                    draw_row(row, options.out)


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: mean PSNR and median speed-up over dense at the same prompts."""
    found = {key(line): line for line in lines}
    cells: dict[tuple[str, float, str], list[tuple[float, float, int]]] = defaultdict(list)
    for line in found.values():
        if line["method"] != DENSE:
            dense = found[key({**line, "method": DENSE})]
            speed = dense["taken"][0] / line["taken"][0]
            cells[line["model"], line["guidance"], line["method"]].append((line["psnr"], speed, line["used"]))
    yield "| model, guidance | node | measured | closeness | fewer steps in the same time | theirs |"
    yield "|---|---|---:|---:|---:|---:|"
    for (model, guidance, method), values in sorted(cells.items()):
        if method.startswith(FEWER):
            continue
        psnr, speeds, _ = zip(*values, strict=True)
        closeness = statistics.mean(psnr)
        speed = statistics.median(speeds)
        fewer = cells.get((model, guidance, FEWER + method))
        beside = ["", ""]
        if fewer:
            steps = sorted({used for _, _, used in fewer})
            many = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
            beside = [many, f"{statistics.mean(psnr for psnr, _, _ in fewer):.1f} dB"]
        named = f"`{method}`" if method == OWN else f"`auto`, speed-up {method.split()[1]}"
        where = f"| `{model}`, {guidance:g} | {named}"
        yield f"{where} | {speed:.1f}× | {closeness:.1f} dB | {' | '.join(beside)} |"


def short_table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of the PSNR of the default method, with that of fewer steps in brackets."""
    found: dict[tuple[str, float, str], list[float]] = defaultdict(list)
    for line in lines:
        if line["method"] != DENSE:
            found[line["model"], line["guidance"], line["method"]].append(line["psnr"])
    psnr = {cell: statistics.mean(values) for cell, values in found.items()}
    yield f"| model, guidance | {' | '.join(f'{speedup:g}×' for speedup in SPEEDUPS)} |"
    yield "|---|" + "---:|" * len(SPEEDUPS)
    for model, guidance in sorted({cell[:2] for cell in psnr}):
        names = [f"auto {speedup:g}" for speedup in SPEEDUPS]
        pairs = [(psnr[model, guidance, name], psnr[model, guidance, FEWER + name]) for name in names]
        cells = " | ".join(f"{own:.1f} ({fewer:.1f})" for own, fewer in pairs)
        yield f"| `{model}`, {guidance:g} | {cells} |"


def write_page(lines: list[dict[str, Any]]) -> None:
    """Write the short table into docs/comfyui.md, and the long one into a file."""
    begin, end = "<!-- written by benchmarks/comfyui.py -->\n", "<!-- end -->"
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    made = "\n".join(short_table(lines))
    PAGE.write_text(f"{head}{begin}{made}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    about = "[The page](../../docs/comfyui.md) says how this was measured."
    text = ["# The node in ComfyUI, and fewer steps", "", about, "", *table(lines), ""]
    TABLE.write_text("\n".join(text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    parser.add_argument(
        "--write", action="store_true", help="write the table into the page, and draw nothing"
    )
    options = parser.parse_args()
    if not (options.table or options.write):
        with torch.inference_mode():
            run(options)
    print(*table(read(options.out)), sep="\n")
    if options.write:
        write_page(read(options.out))


if __name__ == "__main__":
    main()
