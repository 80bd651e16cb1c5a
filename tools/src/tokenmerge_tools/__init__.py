"""Measurement tools: loading pipelines, generating, timing, image quality, and reports from records.

The core does not import this package, and can be read without it. ``tests/test_layering.py`` lists what this
package may import.
"""
