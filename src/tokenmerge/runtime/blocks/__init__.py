"""What runs in a block of a patched model: a plan, the host's method on merged tokens, caches."""
