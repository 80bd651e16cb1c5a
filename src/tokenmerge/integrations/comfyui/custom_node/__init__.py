"""What ComfyUI loads from ``custom_nodes``: this folder is written there, or linked."""

try:
    from tokenmerge.integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except ModuleNotFoundError as error:
    raise ImportError(
        "Token Merging: ComfyUI's Python has no tokenmerge; run it with -m pip install tokenmerge"
    ) from error

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
