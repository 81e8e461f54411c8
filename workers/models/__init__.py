"""Models: configurations and checkpoints in published formats, layers, decoders, draft heads."""
