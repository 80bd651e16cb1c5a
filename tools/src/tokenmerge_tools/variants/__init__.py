"""What is compared with the dense run: methods of this package, other packages, fewer steps."""
