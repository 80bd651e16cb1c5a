"""Generates a few pictures dense and merged, and measures time, memory and closeness."""
