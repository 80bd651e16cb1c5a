"""Turns records into tables, plots and pages. Nothing here runs a model."""
