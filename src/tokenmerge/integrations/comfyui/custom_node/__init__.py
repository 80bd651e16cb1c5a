"""The module that ComfyUI loads. Its folder is copied or linked into ``custom_nodes``."""

try:
    from tokenmerge.integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except ModuleNotFoundError as error:
    raise ImportError(
        "Token Merging: tokenmerge is not installed in ComfyUI's Python; run that Python with -m pip install "
        "tokenmerge"
    ) from error

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
