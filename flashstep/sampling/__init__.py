"""Logits to tokens: counter-based randomness, the sampler, log-probabilities."""
