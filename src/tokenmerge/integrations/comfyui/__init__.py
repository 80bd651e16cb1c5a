"""The node "Token Merging" for ComfyUI, and the folder that brings it there.

This room patches a clone of a model by ComfyUI's own means: attention patches, block replacements and
wrappers. It changes no module. It imports neither ComfyUI nor diffusers, and of this package only what runs
without them. What knows ComfyUI's models stays here.
"""
