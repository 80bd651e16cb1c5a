"""Benchmarks of time and memory, and a description of the machine that they ran on."""
