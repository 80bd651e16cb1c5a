"""Which denoising step of which generation is it: scheduler, pipeline, and what ran when."""
