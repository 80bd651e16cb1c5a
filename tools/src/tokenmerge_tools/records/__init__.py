"""Records of all commands: their kinds, and the one file format that they are written to and read from."""
