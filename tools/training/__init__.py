"""Where the bundled models come from: data, codec, training, export, evaluation. See README.md."""
