"""Evaluations of quality: dense and merged images of many prompts, and metrics over them."""
