"""Pipelines of diffusers: loading, settings, sizes, one call, and a second pipeline on the same weights."""
