"""The page in a real browser."""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.measure.reporting.made import EVIL, write_all
from tokenmerge.measure.reporting.formats import as_html
from tokenmerge.measure.reporting.report_data import TITLE, content_of
from tokenmerge.measure.reporting.results import read_results

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here; apt-get install chromium")

# A frame of a given width holds the page; the script around it looks inside and writes what it finds.
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" src="report.html" style="border:0;width:{width}px;height:900px"></iframe>
<pre id="found">waiting</pre>
<script>
frame.onload = async () => {{
  const page = frame.contentDocument, found = {{}};
  await Promise.all([...page.images].map(image => image.decode()));
  const box = element => element.getBoundingClientRect();
  found.title = page.title;
  found.width = page.documentElement.clientWidth;
  found.content = page.documentElement.scrollWidth;
  found.pictures = [...page.images].map(image => image.naturalWidth);
  found.small = [...page.querySelectorAll("td, th, p, li, figcaption")]
    .filter(e => parseFloat(frame.contentWindow.getComputedStyle(e).fontSize) < 12).length;
  found.headings = [...page.querySelectorAll("h3")].map(e => e.textContent);
  found.scripts = page.scripts.length;
  const row = page.querySelector("tr.published td"), own = page.querySelector("tr.ours td");
  found.colours = [row, own].map(e => frame.contentWindow.getComputedStyle(e).color);
  const slider = page.querySelector("input[type=range]");
  const pair = slider.parentElement.querySelector(".pair");
  const dense = pair.querySelector(".dense");
  const cut = () => frame.contentWindow.getComputedStyle(dense).clipPath;
  found.before = cut();
  slider.value = 80;
  slider.dispatchEvent(new Event("input"));
  found.after = cut();
  found.others = [...page.querySelectorAll(".pair")].filter(e => e.style.getPropertyValue("--cut")).length;
  found.overlap = [box(dense).width - box(pair).width, box(dense).height - box(pair).height];
  found.requests = frame.contentWindow.performance.getEntriesByType("resource")
    .map(entry => entry.name).filter(name => !name.startsWith("data:"));
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    results = read_results([write_all(folder / "results")])
    (folder / "report.html").write_text(as_html(content_of(results)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BROWSER),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        *options,
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_reads_well_and_its_slider_moves(folder: Path, address: str, width: int) -> None:
    (folder / f"harness-{width}.html").write_text(HARNESS.format(width=width), encoding="utf-8")
    options = ("--window-size=1500,1000", "--virtual-time-budget=20000", "--timeout=60000", "--dump-dom")
    for _ in range(3):  # virtual time may run out before a browser that starts cold has loaded the page
        result = browse(f"{address}/harness-{width}.html", *options)
        text = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.DOTALL)[1]
        if text != "waiting":
            break
    found = json.loads(html.unescape(text))
    assert "CONSOLE" not in result.stderr
    assert found["title"] == TITLE  # the prompt's script did not run
    assert EVIL in found["headings"]
    assert found["scripts"] == 1
    assert found["width"] == width
    assert found["content"] == width  # wide tables scroll by themselves
    assert min(found["pictures"]) > 0
    assert found["small"] == 0
    assert found["colours"][0] != found["colours"][1]
    assert found["before"] != found["after"]
    assert found["others"] == 1
    assert max(map(abs, found["overlap"])) < 1
    assert found["requests"] == []
