"""Integrations with other programs, one folder or file each; CONTRIBUTING.md says what each is for."""
