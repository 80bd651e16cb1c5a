"""One picture or a few, dense and merged, from options to files."""
