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
from tools.tests.reporting.made import EVIL, write_all

from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.reporting.page import TITLE, as_html, content_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here; apt-get install chromium"),
]

# An iframe of a given width holds the page. The script around it inspects the page and writes what it finds.
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
  const row = page.querySelector("tr.best td"), own = page.querySelector("tr:not(.best) td");
  found.colours = [row, own].map(e => frame.contentWindow.getComputedStyle(e).backgroundColor);
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
  const head = [...page.querySelectorAll("th")].find(e => e.textContent === "speed-up" &&
    e.closest("table").textContent.includes("not available"));
  const column = [...head.parentElement.children].indexOf(head);
  found.sorted = [];
  for (const click of [1, 2]) {{
    head.firstElementChild.click();
    found.sorted.push([head.getAttribute("aria-sort"),
      [...head.closest("table").tBodies[0].rows].map(row => row.cells[column].textContent)]);
  }}
  const variants = head.parentElement.children[0];
  variants.firstElementChild.click();
  found.words = [...head.closest("table").tBodies[0].rows].map(row => row.cells[0].textContent);
  found.marks = [head, variants].map(e => e.getAttribute("aria-sort"));
  found.paper = frame.contentWindow.getComputedStyle(page.body).backgroundColor;
  found.best = page.querySelectorAll("tr.best").length;
  found.sticky = page.querySelector("td").getBoundingClientRect().width / found.width;
  found.text = page.body.textContent;
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


def looked_at(folder: Path, address: str, width: int, *more: str) -> tuple[dict, str]:
    """What the script found in the page, and what the browser printed."""
    (folder / f"harness-{width}.html").write_text(HARNESS.format(width=width), encoding="utf-8")
    options = (
        "--window-size=1500,1000",
        "--virtual-time-budget=20000",
        "--timeout=60000",
        "--dump-dom",
        *more,
    )
    for _ in range(3):  # on a cold start, virtual time may run out before the page is loaded
        result = browse(f"{address}/harness-{width}.html", *options)
        text = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.DOTALL)[1]
        if text != "waiting":
            break
    return json.loads(html.unescape(text)), result.stderr


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_reads_well_and_its_slider_moves(folder: Path, address: str, width: int) -> None:
    found, printed = looked_at(folder, address, width)
    assert "CONSOLE" not in printed
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
    assert found["best"] > 0
    if width == 400:
        assert found["sticky"] < 0.45  # the sticky first column leaves room for the others
    assert not re.search(r"\binf\b|\bnan\b", found["text"])


def test_columns_sort_by_value_and_words_by_letters(folder: Path, address: str) -> None:
    found, _ = looked_at(folder, address, 1400)
    (down, falling), (up, rising) = found["sorted"]
    assert (down, up) == ("descending", "ascending")
    numbers = [float(text.removesuffix("×")) for text in falling if text]
    assert len(set(numbers)) > 3
    assert numbers == sorted(numbers, reverse=True)
    assert [float(text.removesuffix("×")) for text in rising if text] == sorted(numbers)
    assert falling[len(numbers) :] == rising[len(numbers) :] == [""] * (len(falling) - len(numbers))
    assert len(falling) > len(numbers)  # cells without a number come last both times
    assert found["marks"] == [None, "descending"]
    assert found["words"][0].startswith("tomesd")
    assert found["words"][-1] == "dense"


def test_the_page_is_dark_where_the_reader_prefers_that(folder: Path, address: str) -> None:
    light, dark = (
        looked_at(folder, address, 1400, f"--blink-settings=preferredColorScheme={scheme}")[0]["paper"]
        for scheme in (1, 0)
    )
    assert light == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", dark))) < 64
