"""Generates a few images dense and merged, and measures time, memory and closeness."""
