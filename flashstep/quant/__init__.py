"""Numeric formats: what the bytes mean.

Owns E8M0, E2M1, MXFP8, MXFP4, NVFP4 and FP8 in 32 x 32 blocks, bit exact as spec/model.md section 0. Takes and gives
tensors; knows nothing of layers, caches or checkpoints. Everything is computed in fp32 with true divisions.
"""
