"""Evaluations of quality: dense and merged pictures of many prompts, and metrics over them."""
