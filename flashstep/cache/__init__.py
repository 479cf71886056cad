"""KV memory. ``groups blocks prefix budget`` are torch-free bookkeeping; ``records pool`` hold the bytes.

This file stays a docstring: a re-export here would give the scheduler torch.
"""
