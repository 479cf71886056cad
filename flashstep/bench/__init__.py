"""Measuring the engine on the device it runs on: floors, timed steps, captured graphs."""
