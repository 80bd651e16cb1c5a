"""What outlives a call of a patched model, what holds for one call, and who owns it."""
