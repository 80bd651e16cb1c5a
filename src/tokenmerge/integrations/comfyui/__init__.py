"""The node "Token Merging" for ComfyUI, and the folder that installs it there.

The node patches a clone of a model by ComfyUI's own means: attention patches, block replacements and
wrappers. It changes no module. This folder imports neither ComfyUI nor diffusers, nor any part of tokenmerge
that needs them. All facts about ComfyUI's models are in it.
"""
