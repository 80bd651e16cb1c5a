"""Which denoising step of which generation is it: scheduler, pipeline, guidance, and what ran when."""
