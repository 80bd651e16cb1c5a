"""What each step of one generation does, decided when the generation begins."""
