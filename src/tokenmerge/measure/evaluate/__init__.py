"""What merging costs in quality: many pictures of many prompts, dense and merged, and figures over them."""
