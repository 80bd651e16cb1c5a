"""Planners: one file a method; each turns features, a grid and a configuration into a plan."""
