"""Stands before the page's server: refuses what the page does not send, and knows who is there."""

from __future__ import annotations

import collections
import ipaddress
import json
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tokenmerge.errors import reason_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_API = "/gradio_api"
# The page's requests with a body: a call, and the end of one that waits. None of them uploads a file.
_POSTS = (f"{_API}/queue/join", f"{_API}/cancel")
_WRITES = f"{_API}/deep_link"  # a GET that keeps a file for each state of the fields
_LARGEST_BODY = 2**18  # bytes; the longest prompt takes at most 120,000 in JSON
_HEARTBEAT, _EVENTS = f"{_API}/heartbeat/", f"{_API}/queue/data"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Visitors:
    """The visitors who are there: those with an open connection that waits for news."""

    def __init__(self) -> None:
        self._connections: collections.Counter[str | None] = collections.Counter()

    def __contains__(self, session: str | None) -> bool:
        return self._connections[session] > 0

    def come(self, session: str) -> None:
        """Count a connection of a visitor."""
        self._connections[session] += 1

    def leave(self, session: str) -> None:
        """Count a connection less, and forget a visitor without one."""
        self._connections[session] -= 1
        if not self._connections[session]:
            del self._connections[session]


class Gate:
    """Refuses what the page does not send, before Gradio reads it. An ASGI middleware.

    A request is refused if its ``Host`` is not an address of this server (a page elsewhere whose name was
    pointed here), if its ``Origin`` is another page, or if its body is not that of a call of the page. All
    others go to ``app``. ``host`` is the address that the server listens on.
    """

    def __init__(self, app: App, host: str, visitors: Visitors) -> None:
        self.app, self.visitors = app, visitors
        self.names, self.any_address = _names(host)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if (refusal := self._refusal(scope)) is not None:
            await _answer(send, *refusal)
            return
        session, begun = _session(scope), False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        if session is not None:
            self.visitors.come(session)
        try:
            await self.app(scope, receive, noting)
        except Exception as error:
            reason = f"{type(error).__name__}: {reason_of(error)}"
            print(f"{scope['path'][:200]!r} failed: {reason}", file=sys.stderr)
            if not begun:
                await _answer(send, 400, "request: the page sends no such request; reload the page")
        finally:
            if session is not None:
                self.visitors.leave(session)

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused."""
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._serves(host):
            known = " or ".join(sorted(self.names))
            return 421, f"Host: this page is not served as {host[:200]!r}; open it as {known}, or set --host"
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, "Origin: another page sent this request; open the playground itself"
        if scope["method"] in ("GET", "HEAD") and scope["path"].rstrip("/") != _WRITES:
            return None
        if scope["method"] != "POST" or scope["path"] not in _POSTS:
            return 405, f"{scope['method']} {scope['path'][:200]}: the page has no such request"
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not (length.isdecimal() and len(length) < 10):
            return 411, "Content-Length: the length of the body is needed"
        if int(length) > _LARGEST_BODY:
            return 413, f"body: expected at most {_LARGEST_BODY:,} bytes, got {int(length):,}"
        return None

    def _serves(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self.names or (self.any_address and _is_address(name))


def _names(host: str) -> tuple[set[str], bool]:
    """Return the names of a server that listens on ``host``, and whether any address is one of them.

    Only names can be pointed here by others, so a server that listens everywhere is opened by any address.
    """
    name = host.strip("[]").lower()
    if name in _LOOPBACK:
        return set(_LOOPBACK), False
    if _is_address(name) and ipaddress.ip_address(name).is_unspecified:
        own = socket.gethostname().lower()
        return {*_LOOPBACK, own, f"{own}.local", socket.getfqdn().lower()}, True
    return {name}, False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _session(scope: Message) -> str | None:
    """Return the session that a connection waits for news of."""
    path = scope["path"]
    if path.startswith(_HEARTBEAT):
        return str(path.removeprefix(_HEARTBEAT))
    if path == _EVENTS:
        return next(iter(parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [])), None)
    return None


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
