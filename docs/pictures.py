"""Draw the images of the first page, web UIs, serving, export, the playground and ComfyUI.

    python docs/pictures.py                  # all of them; the last two open Chromium, driven by playwright
    python docs/pictures.py tour serving

What stands in them is counted or compared, so that it does not depend on the machine. Only the image of the
playground shows times, as they were when it was drawn.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline
from PIL import Image

from tokenmerge import apply_token_merging, presets, token_merging
from tokenmerge_tools import demo
from tokenmerge_tools.closeness import psnr
from tokenmerge_tools.export.run import ExportOptions, export
from tokenmerge_tools.method_spec import merging_alone
from tokenmerge_tools.pipelines.loading import twin
from tokenmerge_tools.sheets import as_tensor, enlarge, sheet

DOCS = Path(__file__).parent
MODEL = "emoji-unet"
LARGEST_FILE = 300_000  # bytes


def sample_sheet(columns: Any, rows: Any, side: int | None = None) -> Image.Image:
    """Draw a sheet of images with ``side`` pixels on the longer side; None: at least 320, and at most 512."""
    (width, height), smallest, largest = rows[0][0][0].size, 320, 512
    longest = max(width, height)
    if side is None and longest > largest:
        side = largest

    def fitted(picture: Image.Image) -> Image.Image:
        if side is None:
            return enlarge(picture, max(1, -(-smallest // min(width, height))))
        return picture.resize((width * side // longest, height * side // longest))

    return sheet(columns, [(list(map(fitted, pictures)), caption) for pictures, caption in rows])


def bundled(model: str = MODEL) -> DiffusionPipeline:
    """Return the pipeline of a bundled model."""
    parts = {"safety_checker": None} if model == MODEL else {}
    pipe = DiffusionPipeline.from_pretrained(demo.path(model), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(name: str, picture: Image.Image) -> None:
    """Write an image with a palette, and see that it is small."""
    file = DOCS / f"{name}.png"
    picture.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    if file.stat().st_size > LARGEST_FILE:
        raise RuntimeError(f"{file} has {file.stat().st_size} bytes, more than {LARGEST_FILE}")
    print(f"{file}: {file.stat().st_size} bytes")


def seeded() -> torch.Generator:
    """Noise of one seed."""
    return torch.Generator().manual_seed(5)


def closeness(one: Image.Image, dense: Image.Image) -> str:
    """Return the PSNR in words."""
    return f"{psnr(as_tensor([one]), as_tensor([dense])).item():.1f} dB"


SMALL, LARGE, STEPS = 128, 256, 20
PORT = 8197  # of ComfyUI's server

# --- the first page -------------------------------------------------------------------------------------

SPEEDUPS = (1.5, 2.0, 3.0)
PANEL = 240  # pixels
TOUR = re.compile(r"(<!-- tour: .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)
TOUR_TEXT = """\
## One seed at each speed

![A bundled UNet dense, at three speeds, and in fewer steps](tour-emoji-unet.png)

*One prompt on the bundled UNet `emoji-unet`, {size} × {size} pixels. Above with tokenmerge, below the unchanged model in fewer steps.
This prompt is easy: other images change more, as the table above says.*

![A bundled transformer dense, at three speeds, and in fewer steps](tour-emoji-mmdit.png)

*The same prompt on the bundled transformer `emoji-mmdit`.*
"""


def tour(size: int = LARGE, steps: int = STEPS) -> None:
    """Each bundled model dense, at three speeds and, below, in fewer steps, from one seed."""
    page = DOCS / "index.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        TOUR.sub(lambda found: found[1] + TOUR_TEXT.format(size=size) + found[2], text), encoding="utf-8"
    )
    for model in demo.NAMES:
        pipe = bundled(model)
        dense = tour_picture(pipe, size, steps)
        faster, fewer = [(dense, "dense", f"{steps} steps")], [(dense, "dense", f"{steps} steps")]
        for speedup in SPEEDUPS:
            with token_merging(pipe, speedup=speedup):
                picture = tour_picture(pipe, size, steps)
            faster.append((picture, f"speedup={speedup:g}", f"{closeness(picture, dense)} to dense"))
            picture = tour_picture(pipe, size, round(steps / speedup))
            fewer.append(
                (picture, f"{round(steps / speedup)} steps", f"{closeness(picture, dense)} to dense")
            )
        strips = [
            sample_sheet(
                [(title, small) for _, title, small in row], [([p for p, _, _ in row], "")], side=PANEL
            )
            for row in (faster, fewer)
        ]
        both = Image.new("RGB", (strips[0].width, sum(strip.height for strip in strips)))
        both.paste(strips[0], (0, 0))
        both.paste(strips[1], (0, strips[0].height))
        save(f"tour-{model}", both)


def tour_picture(pipe: DiffusionPipeline, size: int, steps: int) -> Image.Image:
    """Draw the image of the tour."""
    pictures = pipe("a red apple", height=size, width=size, num_inference_steps=steps, generator=seeded())
    return pictures.images[0]


# --- web UIs --------------------------------------------------------------------------------------------

PASSES = (  # name, size, strength, prompt, settings of apply_token_merging
    ("base", SMALL, 1.0, "a red apple", {"speedup": 1.5}),
    ("hires", LARGE, 0.5, "a red apple", {"speedup": 2.0, "until": 0.9}),
    ("img2img", LARGE, 0.7, "a green apple", {"speedup": 1.8}),
)


def web_uis() -> None:
    """Three passes, each at its speed, dense above merged."""
    pipe = bundled()
    img2img = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    img2img.set_progress_bar_config(disable=True)
    # The font of the sheets has no ×.
    rows: dict[str, list[Image.Image]] = {"dense": [], "merged": []}
    counted = []
    for row, pictures in rows.items():
        for _, size, strength, prompt, settings in PASSES:
            passed: dict[str, Any] = {"num_inference_steps": STEPS, "generator": seeded()}
            if pictures:
                own, begin = img2img, pictures[-1].resize((size, size), Image.Resampling.LANCZOS)
                passed |= {"image": begin, "strength": strength}
            else:
                own = pipe
                passed |= {"height": size, "width": size}
            with contextlib.ExitStack() as after:
                if row == "merged":
                    patch = apply_token_merging(own, **settings)
                    after.callback(patch.remove)
                    steps = round(STEPS * strength)
                    report = patch.report(height=size, width=size, steps=steps)
                    counted.append(report.flops_dense / (report.flops_mean or report.flops_merged))
                pictures.append(own(prompt, **passed).images[0])
    columns = []
    for (name, size, _, _, settings), saved in zip(PASSES, counted, strict=True):
        until = f" until {settings['until']}" if "until" in settings else ""
        columns.append(
            (
                f"{name} {size} x {size}",
                f"speedup={settings['speedup']}{until}, {saved:.2f} times fewer operations",
            )
        )
    near = ", ".join(closeness(*pair) for pair in zip(rows["merged"], rows["dense"], strict=True))
    captions = {"dense": "dense", "merged": f"merged: {near} from dense, with what earlier passes changed"}
    large = {row: [picture.resize((LARGE, LARGE)) for picture in pictures] for row, pictures in rows.items()}
    save("web-uis", sample_sheet(columns, [(large[row], captions[row]) for row in rows]))


# --- serving --------------------------------------------------------------------------------------------

REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("a red apple", "dense", None),
    ("a yellow lemon", "speedup=2.0", {"speedup": 2.0}),
    ("a slice of pizza", "ratio=0.5", {"ratio": 0.5}),
    ("a blue fish", "presets.toma(0.5)", {"config": presets.toma(0.5)}),
)


def serving() -> None:
    """Four threads with settings of their own on one set of weights, above what each draws alone."""
    first = bundled()
    workers = []
    for _, _, settings in REQUESTS:
        own = twin(first)
        own.scheduler = type(first.scheduler).from_config(first.scheduler.config)
        if settings is not None:
            apply_token_merging(own, **settings)
        workers.append(own)
    tokens = threading.Lock()  # tokenizers are not for several threads

    def answer(place: int, into: dict[int, Image.Image]) -> None:
        with tokens:
            text, other = workers[place].encode_prompt(REQUESTS[place][0], torch.device("cpu"), 1, True)
        into[place] = workers[place](
            prompt_embeds=text,
            negative_prompt_embeds=other,
            height=SMALL,
            width=SMALL,
            num_inference_steps=STEPS,
            generator=seeded(),
        ).images[0]

    at_once: dict[int, Image.Image] = {}
    threads = [threading.Thread(target=answer, args=(place, at_once)) for place in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone: dict[int, Image.Image] = {}
    for place in range(len(REQUESTS)):
        answer(place, alone)
    same = sum(np.array_equal(at_once[place], alone[place]) for place in alone)
    columns = [(f"thread {place + 1}", name) for place, (_, name, _) in enumerate(REQUESTS)]
    rows = [
        ([at_once[place] for place in range(len(REQUESTS))], "four threads at once, on one set of weights"),
        (
            [alone[place] for place in range(len(REQUESTS))],
            f"each alone: {same} of {len(alone)} are equal in every pixel",
        ),
    ]
    save("serving", sample_sheet(columns, rows))


# --- export ---------------------------------------------------------------------------------------------


def exported() -> None:
    """Images with the exported denoiser in ONNX Runtime beside PyTorch's, by the code of docs/export.md."""
    code = re.findall(
        r"```python\n(.*?)```", (DOCS / "export.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )[0]
    size = (LARGE, LARGE)
    rows = []
    for ratio in (0.0, 0.5):
        pipe = bundled()
        merging = merging_alone(ratio, {})
        config = merging.config(pipe.unet, follows_steps=False)
        arguments: dict[str, Any] = {"height": LARGE, "width": LARGE, "num_inference_steps": STEPS}
        with token_merging(pipe, config) if ratio else contextlib.nullcontext() as patch:
            own = pipe("a red apple", **arguments, generator=seeded()).images[0]
            said = "dense" if patch is None else f"ratio={ratio}"
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found = export(
                ExportOptions(to="onnx", out=Path("exported"), model=MODEL, merging=merging, size=size)
            )
            names: dict[str, Any] = {"pipe": pipe}
            exec(code, names)  # the exported denoiser takes the place of the pipeline's
            other = names["pipe"]("a red apple", **arguments, generator=seeded()).images[0]
            names["pipe"].unet = None
        apart = np.abs(np.asarray(own, int) - np.asarray(other, int)).max()
        caption = (
            f"{said}; largest difference of the denoiser {found['check']['relative_difference']:.0e} of its largest output, "
            f"of the image {apart} of 255"
        )
        rows.append((own, other, caption))
    columns = [("PyTorch", ""), ("ONNX Runtime", "the exported model")]
    save("export", sample_sheet(columns, [([own, other], text) for own, other, text in rows]))


# --- playground -----------------------------------------------------------------------------------------


def playground() -> None:
    """Show the page after one image."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "tokenmerge_tools", "play", "--no-browser"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(600_000)
        page.goto(address)
        page.get_by_label("Steps").fill("10")
        page.get_by_role("button", name="Draw", exact=True).click()
        page.locator("#tried .gallery-item").wait_for()
        page.wait_for_timeout(1000)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.png"
            page.screenshot(path=file, full_page=True)
            save("playground", Image.open(file).convert("RGB"))
        browser.close()
        server.terminate()


# --- ComfyUI --------------------------------------------------------------------------------------------

# Leaves the nodes and their text fields of the page visible, and moves them into the image.
GRAPH_ALONE = """() => {
    const keep = new Set();
    for (const own of document.querySelectorAll("#graph-canvas, .dom-widget")) {
        for (let one = own; one; one = one.parentElement) keep.add(one);
        own.querySelectorAll("*").forEach(one => keep.add(one));
    }
    for (const one of document.querySelectorAll("body *"))
        if (!keep.has(one)) one.style.setProperty("visibility", "hidden", "important");
    const view = window.app.canvas.ds;
    [view.scale, view.offset] = [0.85, [-20, 20]];
    window.app.canvas.show_info = false;
    window.app.canvas.setDirty(true, true);
}"""
COMFYUI = DOCS.parent / ".venv-comfyui" / "bin" / "python"  # by `make environments`


def comfyui() -> None:
    """Show the workflow for Stable Diffusion 1.5 in the page of ComfyUI's server."""
    from playwright.sync_api import sync_playwright

    from tokenmerge.integrations.comfyui.install import SOURCE, install

    workflow = (SOURCE / "example_workflows" / "tokenmerge-sd15.json").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as after:
        checkpoints = Path(folder) / "models" / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "v1-5-pruned-emaonly-fp16.safetensors").touch()
        (Path(folder) / "custom_nodes").mkdir()
        install(folder)
        started = [COMFYUI, DOCS.parent / "tests/integrations/comfyui/comfy_server.py", "--port", PORT]
        started += ["--base-directory", folder, "--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
        log = after.enter_context((Path(folder) / "log.txt").open("wb"))
        server = subprocess.Popen([str(word) for word in started], stdout=log, stderr=log, cwd=folder)
        after.callback(server.wait)
        after.callback(server.terminate)
        playwright = after.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        after.callback(browser.close)
        page = browser.new_page(viewport={"width": 1440, "height": 560})
        page.set_default_timeout(600_000)
        for _ in range(300):
            with contextlib.suppress(Exception):
                page.goto(f"http://127.0.0.1:{PORT}")
                break
            page.wait_for_timeout(2000)
        page.wait_for_function("window.app && window.app.graph && window.app.extensionManager")
        page.wait_for_timeout(5000)
        page.keyboard.press("Escape")  # the templates, which a first visit opens
        page.evaluate("workflow => window.app.loadGraphData(workflow)", json.loads(workflow))
        page.wait_for_timeout(3000)
        page.evaluate(GRAPH_ALONE)
        page.wait_for_timeout(3000)
        file = Path(folder) / "page.png"
        page.screenshot(path=file)
        save("comfyui", Image.open(file).convert("RGB"))


ALL = {
    "tour": tour,
    "web-uis": web_uis,
    "serving": serving,
    "export": exported,
    "playground": playground,
    "comfyui": comfyui,
}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or ALL:
        ALL[wanted]()
