"""The playground as a visitor uses it: the real command, opened in Chromium."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from diffusers import DiffusionPipeline
from PIL import Image
from playwright.sync_api import Browser, Locator, expect, sync_playwright

from tokenmerge_tools import demo

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here; apt-get install chromium"),
    # The arithmetic of some schedulers of diffusers.
    pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning"),
]

PATIENCE = 240_000  # milliseconds: long enough that only failing tests reach it, even on a busy machine
ENDLESS = {"size": 256, "steps": 900}  # several minutes
SMALL = {"size": 64, "steps": 2}
READABLE = 4.5  # least contrast of text, WCAG 2.2, 1.4.3

# The contrast of each text that is shown, without that of buttons that cannot be used.
TEXTS = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = rgb => {
    const [r, g, b] = rgb.map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
  const backdrop = element => {
    if (!element) return [255, 255, 255];
    const own = channels(getComputedStyle(element).backgroundColor);
    return own[3] === undefined ? own : over(own, backdrop(element.parentElement));
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const add = (element, text, color) => {
    const paper = backdrop(element), ink = over(channels(color), paper);
    const [light, dark] = [luminance(paper), luminance(ink)].sort((a, b) => b - a);
    found.push([text, (light + 0.05) / (dark + 0.05)]);
  };
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest("button:disabled, script, style, .cm-gutters, .cm-announced, .icon")) continue;
    add(element, text, getComputedStyle(element).color);
  }
  for (const field of document.querySelectorAll("input, textarea")) {
    if (!field.checkVisibility() || !(field.value || field.placeholder)) continue;
    const style = getComputedStyle(field, field.value ? null : "::placeholder");
    add(field, field.value || field.placeholder, style.color);
  }
  return found;
}"""
# Pairs of labels and buttons of one block that overlap.
OVERLAPS = """() => [...document.querySelectorAll(".block")].flatMap(block => {
  const label = block.querySelector("[data-testid=block-label]"), bar = block.querySelector(".top-panel");
  if (!label || !bar || !label.checkVisibility()) return [];
  const a = label.getBoundingClientRect(), b = bar.getBoundingClientRect();
  return a.right > b.left && a.bottom > b.top ? [label.textContent] : [];
})"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "tokenmerge_tools", "play", "--no-browser", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0]
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        with playwright.chromium.launch(executable_path=BROWSER, args=options) as found:
            yield found


class Visit:
    """One visitor's page."""

    def __init__(self, browser: Browser, address: str, **settings: Any) -> None:
        self.context = browser.new_context(
            viewport={"width": 1400, "height": 1000},
            permissions=["clipboard-read", "clipboard-write"],
            **settings,
        )
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)
        self.button("Draw").wait_for()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def label(self, name: str) -> Locator:
        return self.page.get_by_label(name, exact=True)

    def choose(self, field: str, value: str) -> None:
        self.label(field).click()
        self.page.get_by_role("option", name=value, exact=True).click()

    def begin(self, **fields: object) -> None:
        for name, value in fields.items():
            self.label(name.capitalize()).fill(str(value))
        self.button("Draw").click()

    def draw(self, **fields: object) -> None:
        """Draw, and wait for the image."""
        before = self.tried.count()
        self.begin(**fields)
        expect(self.tried).to_have_count(before + 1, timeout=PATIENCE)
        expect(self.button("Draw")).to_be_enabled(timeout=PATIENCE)

    def expect_message(self, text: str) -> None:
        expect(self.page.locator(".toast-body").last).to_contain_text(text, timeout=PATIENCE)

    @property
    def tried(self) -> Locator:
        return self.page.locator("#tried .gallery-item")

    @property
    def figures(self) -> Locator:
        return self.page.locator(".tiles dd")

    def copied(self, block: str) -> str:
        """The text that the button of a block copies."""
        self.page.locator(f"#{block}").get_by_role("button", name="Copy").click()
        return self.page.evaluate("navigator.clipboard.readText()")

    def picture(self, image: Locator) -> Image.Image:
        """An image of the page, as the server sent it."""
        answer = self.context.request.get(str(image.get_attribute("src")))
        return Image.open(io.BytesIO(answer.body())).convert("RGB")

    def slide(self, place: float) -> np.ndarray:
        """Move the slider to a share of the image's width, and return the image that is shown."""
        pair = self.page.locator("#pair")
        box, bar = pair.locator("img").last.bounding_box(), pair.locator(".inner").bounding_box()
        assert box is not None
        assert bar is not None
        middle = bar["y"] + bar["height"] * 0.75  # below the handle
        self.page.mouse.move(bar["x"] + bar["width"] / 2, middle)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + place * box["width"], middle, steps=4)
        self.page.mouse.up()
        self.page.mouse.move(0, 0)
        return np.asarray(Image.open(io.BytesIO(self.page.screenshot(clip=box))).convert("RGB"), float)


@pytest.fixture
def visits(browser: Browser, address: str) -> Iterator[Any]:
    """Opens pages, and then checks that nothing failed and nothing was loaded from elsewhere."""
    opened: list[Visit] = []

    def visit(**settings: Any) -> Visit:
        opened.append(Visit(browser, address, **settings))
        return opened[-1]

    yield visit
    for one in opened:
        one.context.close()
        assert one.complaints == []
        assert all(url.startswith((address, "data:", "blob:")) for url in one.requests)


def test_it_listens_to_this_machine_alone(address: str) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)


MARKUP = """<img src=x onerror="window.run=1"><script>window.run=1</script><b id=bold>a cat</b>"""


def test_a_prompt_of_html_is_shown_as_text(visits: Any) -> None:
    """The answer of the server has it as it is, in JSON; the page escapes it wherever it shows it."""
    visit = visits()
    visit.choose("Method", "tome")
    visit.draw(prompt=MARKUP, **SMALL)
    expect(visit.tried.first).to_be_visible()
    visit.label("Size").fill("32")
    visit.tried.first.get_by_role("button").click()  # shows the trial again, with its settings
    expect(visit.label("Size")).to_have_value("64x64", timeout=PATIENCE)
    visit.begin(prompt=MARKUP, size="9x9x9", steps=2)  # an error, which may quote what was asked for
    visit.expect_message("size: expected")
    visit.page.wait_for_timeout(500)
    assert "a cat" in visit.page.content()
    assert visit.page.evaluate("window.run") is None
    assert visit.page.locator("#bold, img[src=x]").count() == 0


def test_a_picture_is_drawn_compared_and_drawn_again_by_its_lines(visits: Any) -> None:
    visit = visits()
    visit.choose("Method", "tome")
    visit.draw(prompt="a green pear", seed=3, size=128, steps=4, guidance=3)
    dense_time, merged_time, speedup, closeness, *_ = visit.figures.all_inner_texts()
    # Both times are shown to 0.005 s, and the speed-up to 0.005.
    times = float(dense_time[:-2]), float(merged_time[:-2])
    assert (
        abs(float(speedup[:-1]) - times[0] / times[1]) <= 0.005 + 0.005 * (1 + times[0] / times[1]) / times[1]
    )
    expect(visit.page.locator("#caption")).to_contain_text("1024 to 512 tokens")
    dense, merged = (visit.picture(image) for image in visit.page.locator("#pair img").all())
    error = (np.asarray(dense, float) - np.asarray(merged, float)) / 255
    assert closeness == f"{-10 * np.log10((error**2).mean()):.1f} dB"

    # The image is dense before the slider, and merged after it.
    for place, seen, other in ((0.05, merged, dense), (0.95, dense, merged)):
        shot = visit.slide(place)
        height, width = shot.shape[:2]
        inside = slice(height // 5, height), slice(width // 5, -width // 5)
        far = [
            np.abs(shot - np.asarray(one.resize((width, height), Image.Resampling.BILINEAR), float))[
                inside
            ].mean()
            for one in (seen, other)
        ]
        assert far[0] < far[1] / 2

    pipe = DiffusionPipeline.from_pretrained(demo.path("emoji-unet"), safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    names: dict[str, Any] = {"pipe": pipe}
    exec(visit.copied("python"), names)
    assert np.array_equal(names["image"], merged)
    assert visit.copied("tune").startswith("tokenmerge tune --model emoji-unet --speedup ")


def test_what_was_tried_comes_back_with_its_settings(visits: Any) -> None:
    visit = visits()
    visit.choose("Method", "tome")
    visit.draw(**SMALL, seed=1)
    first = visit.figures.all_inner_texts()
    visit.choose("Method", "toma")
    visit.draw(seed=2)
    expect(visit.tried.nth(0)).to_contain_text("toma, ratio 0.5")
    expect(visit.tried.nth(1)).to_contain_text("tome, ratio 0.5")
    expect(visit.tried.nth(1)).to_contain_text("seed 1, 64×64, 2 steps")
    visit.tried.nth(1).get_by_role("button").click()
    expect(visit.label("Seed")).to_have_value("1", timeout=PATIENCE)
    expect(visit.label("Method")).to_have_value("tome")
    expect(visit.figures).to_have_text(first)


def test_a_wrong_size_is_refused_with_a_sentence(visits: Any) -> None:
    visit = visits()
    visit.begin(size=130, steps=2)
    visit.expect_message("size: this model needs multiples of 4 pixels, got 130x130; use 128x128")
    expect(visit.button("Draw")).to_be_enabled()
    expect(visit.tried).to_have_count(0)
    visit.choose("Method", "tome")
    visit.draw(**SMALL)


def test_stop_ends_what_runs_or_waits_and_a_visitor_who_leaves_is_not_drawn_for(visits: Any) -> None:
    first, second = visits(), visits()
    first.begin(**ENDLESS)
    expect(first.page.locator("#tiles")).to_contain_text("/900 steps", timeout=PATIENCE)
    second.begin(**SMALL)
    expect(second.page.locator("#tiles")).to_contain_text("queue: 1/1", timeout=PATIENCE)
    second.button("Stop").click()
    second.expect_message("This trial was discarded.")
    expect(second.button("Draw")).to_be_enabled(timeout=PATIENCE)
    expect(first.button("Stop")).to_be_enabled()  # of this visitor, nothing was stopped

    first.button("Stop").click()
    first.expect_message("This trial was discarded.")
    expect(first.button("Draw")).to_be_enabled(timeout=PATIENCE)
    expect(first.tried).to_have_count(0)

    first.begin(**ENDLESS)
    expect(first.page.locator("#tiles")).to_contain_text("/900 steps", timeout=PATIENCE)
    first.page.close()
    second.choose("Method", "tome")
    second.draw(**SMALL)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_and_nothing_overflows(visits: Any, scheme: str) -> None:
    visit = visits(color_scheme=scheme)
    visit.choose("Method", "tome")
    visit.draw(**SMALL)
    visit.page.get_by_text("What ran, and what that saves").click()
    visit.begin(size="wide")
    visit.expect_message("size: expected")
    for width in (1400, 400):
        visit.page.set_viewport_size({"width": width, "height": 1000})
        visit.page.wait_for_timeout(500)  # transitions
        content = visit.page.evaluate("document.documentElement.scrollWidth")
        assert content == width
        texts = visit.page.evaluate(TEXTS)
        assert {"Dense", "Speed-up by the clock", "Draw", "tokenmerge", "the model's"} <= {
            text for text, _ in texts
        }
        assert [(text, contrast) for text, contrast in texts if contrast < READABLE] == []
        assert visit.page.evaluate(OVERLAPS) == []
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", paper)[:3])) < 64) == (scheme == "dark")
