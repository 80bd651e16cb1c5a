"""Stands before the page's server: refuses what the page does not send, and knows who is there."""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tokenmerge.errors import reason_of

_API = "/gradio_api"
# The page's requests with a body: a call, and the end of one that waits. None of them uploads a file.
_POSTS = (f"{_API}/queue/join", f"{_API}/cancel")
_WRITES = f"{_API}/deep_link"  # a GET that keeps a file for each state of the fields
_LARGEST_BODY = 2**18  # bytes; the longest prompt takes at most 120,000 in JSON
_HEARTBEAT = f"{_API}/heartbeat/"
_EVENTS = f"{_API}/queue/data"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# This stands for all IP addresses in the list of names. A page cannot pretend to have another IP address.
_ANY_ADDRESS = "*"
_POLICY = 1008  # the status of WebSocket for a refusal
# These headers make Gradio take another address for that of the page.
_FROM_PROXIES = (b"x-forwarded-", b"forwarded", b"x-gradio-server")

# The open connections that wait for news, by the session of their visitor.
Visitors = collections.Counter[str]


class Gate:
    """Refuses what the page does not send, before Gradio reads it. An ASGI middleware around all others.

    A request is refused if its ``Host`` is no name of this server, if its ``Origin`` is another page, or if
    its body is not that of a call of the page. Other requests go to ``app``, without the headers that proxies
    add. ``names`` are those of :func:`served_names`, and ``root_path`` is the public address of the server.
    """

    def __init__(self, app: Any, names: Sequence[str], root_path: str = "") -> None:
        self.app = app
        self.names = names
        self.root = urlsplit(root_path)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        from starlette.responses import JSONResponse

        if scope["type"] == "websocket":  # the page opens none
            await send({"type": "websocket.close", "code": _POLICY})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = [pair for pair in scope["headers"] if not pair[0].lower().startswith(_FROM_PROXIES)]
        scope = {**scope, "headers": headers, "scheme": "http"}
        refusal = self._refusal(scope)
        if refusal is not None:
            status, reason = refusal
            await JSONResponse({"detail": reason}, status)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused."""
        from starlette.datastructures import Headers

        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if not _is_served(host, self.names):
            return 400, "Host: this server has another name; tokenmerge play --host and --root-path tell it"
        origin = headers.get("origin")
        if origin is not None:
            page = urlsplit(origin)
            known = page.netloc and (page.scheme, page.netloc.lower()) == (self.root.scheme, self.root.netloc)
            if not known and page.netloc.lower() != host:
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


class Reception:
    """Counts the connections of visitors, and answers where Gradio fails. An ASGI middleware."""

    def __init__(self, app: Any, visitors: Visitors) -> None:
        self.app = app
        self.visitors = visitors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        session = _session(scope)
        self.visitors[session] += 1
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            reason = f"{type(error).__name__}: {reason_of(error)}"
            print(f"{scope['path'][:200]!r} failed: {reason}", file=sys.stderr)
            advice = "request: the page sends no such request; reload the page"
            with contextlib.suppress(RuntimeError):  # it is too late if an answer has begun
                await JSONResponse({"detail": advice}, 400)(scope, receive, send)
        finally:
            self.visitors[session] -= 1
            if not self.visitors[session]:
                del self.visitors[session]


def served_names(host: str, root_path: str = "") -> list[str]:
    """Return the names under which a server that listens on ``host`` answers; ``"*"`` is any address.

    A request under any other name is refused: an attacker could point a name at this server, and pages under
    that name could then read this page. ``root_path`` adds the name in the public address of the server.
    """
    name = host.strip("[]").lower()
    written = f"[{name}]" if ":" in name else name  # an IPv6 address
    names = list(_LOOPBACK) if written in _LOOPBACK else [written]
    if name in ("0.0.0.0", "::"):
        host_names = {known.lower() for known in (socket.gethostname(), socket.getfqdn())}
        names = [_ANY_ADDRESS, *_LOOPBACK, *sorted(host_names | {f"{known}.local" for known in host_names})]
    public = urlsplit(root_path).hostname
    return [*names, public] if public and public not in names else names


def _is_served(host: str, names: Sequence[str]) -> bool:
    """Return whether a header ``Host`` has one of the served names, with or without a port."""
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return _ANY_ADDRESS in names


def _session(scope: Any) -> str:
    """Return the session that a connection waits for news of, or an empty text for any other request."""
    path = scope["path"]
    if path.startswith(_HEARTBEAT):
        return str(path.removeprefix(_HEARTBEAT))
    if path == _EVENTS:
        return next(iter(parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [])), "")
    return ""
