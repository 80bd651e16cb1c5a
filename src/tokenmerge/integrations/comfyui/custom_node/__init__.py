"""The module that ComfyUI loads. Its folder is copied or linked into ``custom_nodes``."""

try:
    from tokenmerge.integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except ModuleNotFoundError as error:
    from pathlib import Path

    # This file as it lies in a checkout, which it does if the folder is a link to it.
    _folders = Path(__file__).resolve().parents
    _checkout = (
        _folders[5] if len(_folders) > 5 and (_folders[5] / "tools" / "pyproject.toml").is_file() else None
    )
    _needed = _checkout or f"-r {Path(__file__).parent / 'requirements.txt'}"
    raise ImportError(
        "Token Merging: tokenmerge is not installed in ComfyUI's Python; run that Python with -m pip install "
        f"{_needed}"
    ) from error

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
