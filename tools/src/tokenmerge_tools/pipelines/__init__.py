"""Diffusers pipelines: loading, settings, sizes, repeatable calls, and copies with shared weights."""
