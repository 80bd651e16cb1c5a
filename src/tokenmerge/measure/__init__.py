"""Measuring: loading pipelines, generating, timing, judging pictures, and reports from records.

The core does not import it, and can be read without it. May import what its line in
``tests/test_layering.py`` lists.
"""
