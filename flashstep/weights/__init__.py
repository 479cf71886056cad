"""Checkpoint <-> parameters: released names, reading, writing and random weights."""
