"""Serves the page on this machine, without any other service."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from tokenmerge.errors import ConfigError, MissingExtraError
from tokenmerge_tools.play.gate import Gate, Reception, Visitors, served_names

LOCAL = "127.0.0.1"
# Gradio's own colours are too pale to read.
_READABLE = {
    "body_text_color_subdued": "*neutral_500",
    "input_placeholder_color": "*neutral_500",
    "input_placeholder_color_dark": "*neutral_400",
    "button_primary_background_fill": "*primary_600",
    "button_primary_background_fill_hover": "*primary_700",
}
_NEEDED = ("gradio", "torchmetrics", "diffusers")


def require_gradio() -> None:
    """Raise a MissingExtraError unless everything that the playground needs is installed."""
    missing = [package for package in _NEEDED if not importlib.util.find_spec(package)]
    if missing:
        needed_by = f"tokenmerge play needs {', '.join(missing)}"
        raise MissingExtraError("tokenmerge-tools[play]", needed_by, packages=len(missing))


def serve(
    build: Callable[[Visitors], Any],
    host: str = LOCAL,
    port: int | None = None,
    browser: bool = False,
    on_ready: Callable[[str], None] = print,
    root_path: str = "",
) -> None:
    """Serve a page, which ``build`` makes as Gradio's ``Blocks``, until Ctrl-C.

    ``build`` receives the visitors who are there. Any host other than 127.0.0.1 lets other machines use the
    page. Without a port, it is the first free one from 7860 on. ``on_ready`` gets its address. ``root_path``
    is the public address, such as that of a proxy. It is not read from headers.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with tempfile.TemporaryDirectory(prefix="tokenmerge-play-") as images:
        os.environ["GRADIO_TEMP_DIR"] = images  # Gradio reads it when it is imported
        import gradio as gr
        from gradio.routes import App, ORJSONResponse
        from starlette.middleware import Middleware

        from tokenmerge_tools.play.page import STYLE

        visitors = Visitors()
        fonts = ("system-ui", "sans-serif")
        theme = gr.themes.Default(font=fonts, font_mono=("ui-monospace", "monospace"), primary_hue="blue")
        theme.set(**_READABLE)
        # These go around Gradio's own middleware, which answers other pages that ask what they may send.
        reception = Middleware(Reception, visitors=visitors)
        app: Any = App(default_response_class=ORJSONResponse, middleware=[reception])
        inner = app.build_middleware_stack
        names = served_names(host, root_path)
        app.build_middleware_stack = lambda: Gate(inner(), names, root_path)
        page = build(visitors)
        try:
            off = ("share", "run_history", "enable_monitoring", "ssr_mode", "pwa", "mcp_server")
            _, address, _ = page.queue(max_size=32).launch(
                server_name=host,
                server_port=port,
                inbrowser=browser,
                prevent_thread_lock=True,
                quiet=True,
                footer_links=[],
                show_error=True,
                root_path=root_path,
                _app=app,
                theme=theme,
                css_paths=STYLE,
                **dict.fromkeys(off, False),
            )
        except OSError as error:
            taken = "all ports from 7860 on are" if port is None else f"{port} is"
            raise ConfigError(
                f"port: cannot listen on {host} ({taken} in use, or not allowed); give another --port"
            ) from error
        on_ready(address)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        page.close(verbose=False)
