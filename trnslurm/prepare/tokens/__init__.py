"""From text to token files: what language models train on."""
