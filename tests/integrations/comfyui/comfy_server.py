"""Starts ComfyUI's server: ``python comfy_server.py --port 8188 --base-directory FOLDER``."""

from __future__ import annotations

import runpy
import sys

import comfy_code

if __name__ == "__main__":
    comfy_code.use(*sys.argv[1:])
    import utils.extra_config

    # The wheel refers to folders that it does not contain.
    utils.extra_config.load_extra_path_config = lambda path: None
    sys.argv = ["main.py", "--cpu", *sys.argv[1:]]
    runpy.run_path(str(comfy_code.COMFYUI / "main.py"), run_name="__main__")
