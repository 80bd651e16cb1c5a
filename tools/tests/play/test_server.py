"""The playground's server as strangers use it: the real command, and requests that its page never sends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("gradio")
pytestmark = pytest.mark.slow  # a process of its own

API = "/gradio_api"
PATIENCE = 240  # seconds: long enough that only failing tests reach it, even on a busy machine
# The values of the fields, after the two states of the page.
FIELDS = {
    "model": "emoji-unet",
    "prompt": "a red apple",
    "seed": 0,
    "size": "64",
    "steps": 2,
    "guidance": "",
    "method": "tome",
    "speedup": 2.0,
    "ratio": 0.5,
}
ENDLESS = {"size": "256", "steps": 900}  # several minutes


class Server:
    """A running playground."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        functions = self.get("/config").json()["dependencies"]
        self.functions = {one["api_name"]: one["id"] for one in functions}

    def get(self, path: str, **headers: str) -> Any:
        return httpx.get(self.address + path, headers=headers, timeout=PATIENCE)

    def post(self, path: str, body: bytes = b"{}", **headers: str) -> Any:
        return httpx.post(self.address + path, content=body, headers=headers, timeout=PATIENCE)

    def join(
        self, function: str | int, data: list[Any], event: Any = None, **headers: str
    ) -> tuple[str, Any]:
        """Ask for a call. Return the session and the answer."""
        session = uuid.uuid4().hex
        number = self.functions.get(function, function)
        call = {"fn_index": number, "data": data, "session_hash": session, "event_data": event}
        headers = {"content-type": "application/json", **headers}
        return session, self.post(f"{API}/queue/join", json.dumps(call).encode(), **headers)

    @contextlib.contextmanager
    def news(self, session: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The messages about the calls of a session."""
        query = {"session_hash": session}
        with httpx.stream("GET", f"{self.address}{API}/queue/data", params=query, timeout=PATIENCE) as answer:
            lines = (line.partition(":")[2] for line in answer.iter_lines())
            yield (json.loads(line) for line in lines if line.strip())

    def call(self, function: str, data: list[Any], event: Any = None) -> dict[str, Any]:
        """Call a function of the page. Return how it ended."""
        session, answer = self.join(function, data, event)
        assert answer.status_code == 200, answer.text
        with self.news(session) as news:
            return next(one for one in news if one["msg"] == "process_completed")

    def draw(self, **changes: Any) -> dict[str, Any]:
        return self.call("drawn", fields(**changes))


def fields(**changes: Any) -> list[Any]:
    return [None, None, *{**FIELDS, **changes}.values()]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # A visitor who never comes is waited for a second only, since that time is spent drawing.
    script = (
        "import sys; from tokenmerge_tools.cli import main; from tokenmerge_tools.play import trials;"
        "trials._PATIENCE = 1.0; sys.exit(main(['play', '--no-browser', '--device', 'cpu']))"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        yield Server(running.stdout.readline().split()[0])
        running.terminate()


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "10.0.0.1", ""]
)
def test_a_page_that_was_pointed_here_is_refused(server: Server, name: str) -> None:
    for answer in (server.get("/config", host=name), server.join("end", [], host=name)[1]):
        assert answer.status_code == 400


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:1", "[::1]:7860"])
def test_the_names_of_this_machine_are_served(server: Server, name: str) -> None:
    assert server.get("/config", host=name).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://"])
def test_a_page_from_elsewhere_cannot_call(server: Server, origin: str) -> None:
    assert server.join("end", [], origin=origin)[1].status_code == 403
    assert server.get("/config", origin=origin).status_code == 403
    assert server.join("end", [], origin=server.address)[1].status_code == 200


ROUTES = (
    *("/", "/config", "/gradio_api/info", "/gradio_api/upload", "/gradio_api/queue/join", "/theme.css"),
    *("/gradio_api/queue/data?session_hash=x", "/gradio_api/heartbeat/x", "/gradio_api/file=/etc/hostname"),
    *("/gradio_api/stream/x/y/z/playlist.m3u8", "/login", "/gradio_api/proxy=https://evil.example/x"),
)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PUT", "DELETE"])
def test_no_route_answers_a_foreign_page_or_a_name_that_points_here(
    server: Server, path: str, method: str
) -> None:
    own = server.address.partition("//")[2]
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    foreign = {"origin": "http://evil.example", "host": own}, {"origin": "null", "host": own}
    rebound = {"origin": "http://evil.example:7860", "host": "evil.example:7860"}, {"host": "evil.example"}
    for headers, status in [*((one, 403) for one in foreign), *((one, 400) for one in rebound)]:
        answer = httpx.request(method, server.address + path, headers={**headers, **asks}, timeout=PATIENCE)
        assert answer.status_code == status, headers
        assert not [name for name in answer.headers if name.startswith("access-control")], headers


def test_no_websocket_is_opened(server: Server) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    key = {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
    for origin in ({}, {"origin": "http://evil.example"}):
        answer = server.get(f"{API}/queue/join", **upgrade, **key, **origin)
        assert answer.status_code in (403, 404, 405)


TOLD_BY_PROXIES = {
    "x-forwarded-host": "evil.example",
    "x-forwarded-proto": "https",
    "x-forwarded-for": "6.6.6.6",
    "x-gradio-server": "https://evil.example",
    "forwarded": "host=evil.example;proto=https",
}


@pytest.mark.parametrize("name", TOLD_BY_PROXIES)
def test_a_header_does_not_move_the_page(server: Server, name: str) -> None:
    told = {name: TOLD_BY_PROXIES[name]}
    assert server.get("/config", **told).json()["root"] == server.address
    assert "evil.example" not in server.get("/", **told).text


@pytest.mark.parametrize(
    "path", ["upload", "run/drawn", "call/drawn", "api/predict", "component_server", "process_recording", "x"]
)
def test_nothing_is_uploaded_and_no_call_passes_the_queue(server: Server, path: str) -> None:
    begun = time.monotonic()
    answer = server.post(f"{API}/{path}", b"x" * 10**7, **{"content-type": "multipart/form-data; boundary=x"})
    assert answer.status_code == 405
    assert time.monotonic() - begun < PATIENCE / 2


def test_bodies_are_short_and_of_known_length(server: Server) -> None:
    assert server.post(f"{API}/queue/join", b" " * 300_000).status_code == 413
    endless = httpx.post(f"{server.address}{API}/queue/join", content=iter([b"{", b"}"]))
    assert endless.status_code == 411
    assert server.get(f"{API}/deep_link?session_hash=x").status_code == 405


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 10**9}, "steps: expected an integer from 1 to 1,000"),
        ({"size": "100000x100000"}, "size: expected at most 1,048,576 pixels"),
        ({"size": "9" * 30_000}, "size: expected at most 40 characters"),
        ({"prompt": "x" * 10_001}, "prompt: expected at most 10,000 characters, got 10,001"),
        ({"model": "owner/other"}, "model: expected one of"),
    ],
)
def test_a_trial_beyond_the_limits_is_refused_at_once(
    server: Server, changes: dict[str, Any], words: str
) -> None:
    ended = server.draw(**changes)
    assert not ended["success"]
    assert ended["output"]["error"].startswith(words)


@pytest.mark.parametrize("name", FIELDS)
def test_values_of_other_types_are_named(server: Server, name: str) -> None:
    method = {"method": "auto"} if name == "speedup" else {}  # of the two, the method reads its own number
    for value in ([], {}, True, [[1]], 10**400):
        ended = server.draw(**{**method, name: value})
        assert not ended["success"]
        assert ended["output"]["error"].startswith(f"{name}: "), value
    file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    assert server.draw(**{**method, name: file})["output"]["error"]


def test_no_part_of_the_page_that_shows_html_gets_a_prompt_as_it_is(server: Server) -> None:
    """The parts that show text do; test_browser opens them."""
    markup = "<img src=x onerror=run()><script>run()</script>"
    config = server.get("/config").json()
    kinds = {part["id"]: part["type"] for part in config["components"]}
    outputs = next(one["outputs"] for one in config["dependencies"] if one["api_name"] == "drawn")
    ended = server.draw(prompt=markup)
    assert ended["success"]
    shown = zip(outputs, ended["output"]["data"], strict=True)
    as_html = [str(value) for part, value in shown if kinds[part] in ("html", "markdown")]
    assert as_html
    assert not any("<script" in value or "<img" in value for value in as_html)
    assert "<img" not in server.draw(size="<img src=x>")["output"]["error"]


@pytest.mark.parametrize("event", [None, [1], {}, {"index": "x"}, {"index": 3, "value": None}, {"index": -1}])
def test_a_picture_that_was_never_drawn_cannot_be_seen_again(server: Server, event: Any) -> None:
    ended = server.call("again", [None], event)
    assert ended["output"]["error"].startswith("Choose one of the images tried before")


def test_calls_in_another_order_are_answered(server: Server) -> None:
    assert server.draw()["success"]  # without the call that begins a trial on the page
    assert server.call("halted", [None])["success"]
    assert server.call("end", [])["success"]
    assert "enough input values" in server.call("drawn", [])["output"]["error"]
    unknown = server.join(999, [])[1]
    assert (unknown.status_code, unknown.json()["detail"]) == (
        400,
        "request: the page sends no such request; reload the page",
    )
    cancel = json.dumps({"session_hash": "x", "fn_index": 1, "event_id": "y"}).encode()
    assert server.post(f"{API}/cancel", cancel, **{"content-type": "application/json"}).status_code == 200
    with server.news("unknown") as news:
        assert next(news)["session_not_found"]


@pytest.mark.parametrize("leaves", ["during a step", "before the first step", "without coming"])
def test_a_visitor_who_leaves_is_not_drawn_for(server: Server, leaves: str) -> None:
    session, answer = server.join("drawn", fields(**ENDLESS))
    assert answer.status_code == 200
    if leaves != "without coming":
        with server.news(session) as news:
            if leaves == "during a step":
                next(one for one in news if "steps" in json.dumps(one))
    begun = time.monotonic()
    assert server.draw()["success"]
    assert time.monotonic() - begun < PATIENCE / 2
