"""Who runs next: request ids, positions and block numbers, never token values' meaning, never tensors (torch-free)."""
