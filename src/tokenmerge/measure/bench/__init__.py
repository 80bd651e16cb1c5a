"""Measuring time, memory and the machine they were measured on."""
