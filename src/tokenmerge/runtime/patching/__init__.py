"""What changes a model: patching, restoring, and the hooks before and after its calls."""
