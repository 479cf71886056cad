"""Text in, text out, over HTTP. Torch-free; reaches the engine only over ``flashstep.ipc``."""
