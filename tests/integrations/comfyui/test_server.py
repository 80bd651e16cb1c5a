"""ComfyUI's real server: the node in workflows that are posted to it."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tokenmerge.integrations.comfyui.install import SOURCE, install

HERE = Path(__file__).parent
# An idle machine with two cores needs a quarter of these.
START, PICTURE = 240.0, 400.0


class Server:
    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address, self.log = f"http://127.0.0.1:{port}", folder / "log.txt"
        command = [sys.executable, HERE / "comfy_server.py", "--listen", "127.0.0.1", "--port", port]
        command += ["--base-directory", folder, "--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, cwd=folder)

    def wait(self):
        for _ in range(int(START)):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                return self.get("/system_stats")
            except OSError:
                time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, prompt):
        """(status, answer) of the server to a workflow in the form of its API."""
        body = json.dumps({"prompt": prompt}).encode()
        request = urllib.request.Request(self.address + "/prompt", body)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def run(self, prompt):
        """The server's record of a finished workflow."""
        status, answer = self.post(prompt)
        assert status == 200, answer
        until = time.monotonic() + PICTURE
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            done = self.get(f"/history/{answer['prompt_id']}").get(answer["prompt_id"])
            if done:
                return done
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-3000:])

    def picture(self, facts):
        address = (
            f"{self.address}/view?filename={facts['filename']}&subfolder={facts['subfolder']}&type=output"
        )
        with urllib.request.urlopen(address, timeout=30) as answer:
            return np.asarray(Image.open(io.BytesIO(answer.read())).convert("RGB"), dtype=np.float64)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comfyui")
    (folder / "custom_nodes").mkdir()
    install(folder)
    own = f"import sys\nsys.path.append({str(HERE)!r})\nfrom emoji_nodes import NODE_CLASS_MAPPINGS\n"
    (folder / "custom_nodes" / "emoji.py").write_text(own)
    server = Server(folder)
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def workflow(name, ratios, steps=8, size=256, **inputs):
    """One image for each ratio, from the same noise; without the node for None."""
    given = {"method": "tomesd", "start_percent": 0.0, "end_percent": 1.0, **inputs}
    sampling = {"seed": 3, "steps": steps, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple"}
    nodes = {
        "load": ("EmojiModel", {"name": name, "text": "a grinning face on a light blue background"}),
        "latent": ("EmptyLatentImage", {"width": size, "height": size, "batch_size": 1}),
    }
    for i, ratio in enumerate(ratios):
        model = ["load", 0]
        if ratio is not None:
            merging = {**given, "model": model, "latent": ["latent", 0], "ratio": ratio}
            nodes[f"merge{i}"], model = ("TokenMerging", merging), [f"merge{i}", 0]
            nodes[f"text{i}"] = "PreviewAny", {"source": [f"merge{i}", 1]}
        whole = {**sampling, "denoise": 1.0, "latent_image": ["latent", 0], "model": model}
        nodes[f"sample{i}"] = "KSampler", {**whole, "positive": ["load", 1], "negative": ["load", 2]}
        nodes[f"decode{i}"] = "EmojiDecode", {"name": name, "latent": [f"sample{i}", 0]}
        prefix = f"{name}-{given['method']}-{ratio}"
        nodes[f"save{i}"] = "SaveImage", {"filename_prefix": prefix, "images": [f"decode{i}", 0]}
    return {key: {"class_type": kind, "inputs": values} for key, (kind, values) in nodes.items()}


@pytest.mark.parametrize(
    ("name", "size", "inputs"),
    [
        ("emoji-unet", 256, {"method": "tomesd"}),
        # auto skips nothing below 10 steps.
        ("emoji-unet", 256, {"method": "auto", "steps": 12}),
        ("emoji-mmdit", 192, {"method": "auto", "steps": 12}),
    ],
)
def test_a_workflow_that_is_posted(server, name, size, inputs):
    done = server.run(workflow(name, [None, 0.5], size=size, **inputs))
    assert done["status"]["status_str"] == "success", done["status"]
    outputs = done["outputs"]
    dense, merged = (server.picture(outputs[f"save{i}"]["images"][0]) for i in range(2))
    assert dense.shape == merged.shape == (size // 2, size // 2, 3)
    assert not np.array_equal(merged, dense)
    # Two emojis on other backgrounds differ by more than a fifth of the range, which is 14 dB.
    assert 10 * np.log10(255**2 / ((merged - dense) ** 2).mean()) > 17
    assert f"latents {size // 8} × {size // 8}" in outputs["text1"]["text"][0]


def test_ratio_0_is_identity_in_the_server_too(server):
    outputs = server.run(workflow("emoji-unet", [None, 0.0], steps=3, method="auto"))["outputs"]
    dense, same = (server.picture(outputs[f"save{i}"]["images"][0]) for i in range(2))
    assert np.array_equal(same, dense)


def test_bad_input_is_a_sentence_in_the_server_too(server):
    done = server.run(workflow("emoji-unet", [0.5], start_percent=0.6, end_percent=0.5))
    assert done["status"]["status_str"] == "error"
    said = next(facts for kind, facts in done["status"]["messages"] if kind == "execution_error")
    assert said["node_type"] == "TokenMerging"
    assert "lower start_percent, or raise end_percent" in said["exception_message"]


@pytest.mark.parametrize(
    "file", sorted((SOURCE / "example_workflows").glob("*.json")), ids=lambda file: file.stem
)
def test_the_server_takes_the_workflows_that_come_along(server, file):
    """It accepts all their nodes, links and values, except for the missing model files."""
    known = server.get("/object_info")
    status, answer = server.post(in_api_form(json.loads(file.read_text()), known))
    assert status == 400
    errors = [error for node in answer["node_errors"].values() for error in node["errors"]]
    assert errors
    for error in errors:
        assert error["type"] == "value_not_in_list", error
        assert error["extra_info"]["received_value"].endswith(".safetensors"), error


def in_api_form(workflow, known):
    """A workflow from a file, converted to the form of the server's API."""
    links = {number: [str(source), out] for number, source, out, *_ in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        linked = {
            value["name"]: links[value["link"]] for value in node["inputs"] if value["link"] is not None
        }
        values, inputs = iter(node["widgets_values"]), dict(linked)
        described = known[node["type"]]["input"]
        for name, (kind, *facts) in {**described["required"], **described.get("optional", {})}.items():
            if isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
                inputs[name] = next(values)
                if facts and facts[0].get("control_after_generate"):
                    next(values)
        assert not list(values), node["type"]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt
