"""``tokenmerge play``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from tokenmerge.errors import ConfigError, short_repr
from tokenmerge_tools.pipelines.loading import find_model, quiet_libraries
from tokenmerge_tools.pipelines.options import Device, Dtype, GenerateOptions, Model, option
from tokenmerge_tools.pipelines.settings import resolve_device, resolve_dtype
from tokenmerge_tools.play.server import LOCAL, require_gradio, serve

_server = partial(option, "Server")
_HIGHEST_PORT = 65_535


def play(
    model: Model = GenerateOptions.model,
    dtype: Dtype = GenerateOptions.dtype,
    device: Device = GenerateOptions.device,
    host: Annotated[
        str, _server("Address to listen on. With 0.0.0.0, everyone who can reach this machine can use it.")
    ] = LOCAL,
    port: Annotated[
        int | None, _server("Port. Default: the first free one from 7860 on.", parser="integer")
    ] = None,
    root_path: Annotated[
        str, _server("Address by which others open the page, such as that of a proxy: https://box.lan/play.")
    ] = "",
    browser: Annotated[
        bool, _server("Open the page in the default browser.", "--browser/--no-browser")
    ] = True,
) -> None:
    """Open a page in the browser that draws images with and without tokenmerge, and compares them.

    The page shows times, closeness, the plan and what merges, beside dense in fewer steps. It keeps a list of
    the trials. It sends nothing to other services, and loads nothing from them except a model given by its
    hub id. Ctrl-C ends it.
    """
    require_gradio()
    if port is not None and not 1 <= port <= _HIGHEST_PORT:
        raise ConfigError(f"port: expected an integer from 1 to {_HIGHEST_PORT}, got {short_repr(port)}")
    if root_path and not root_path.startswith(("http://", "https://")):
        raise ConfigError(
            f"root_path: expected an address such as https://box.lan/play, got {short_repr(root_path)}"
        )
    find_model(model)
    resolve_dtype(dtype, resolve_device(device))
    quiet_libraries("tokenmerge play")
    from tokenmerge_tools.play.page import build

    serve(
        partial(build, model, dtype=dtype, device=device),
        host,
        port,
        browser,
        on_ready=lambda address: print(f"{address} (Ctrl-C ends it)", flush=True),
        root_path=root_path,
    )
