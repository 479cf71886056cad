"""flashstep: an inference engine for the DeepSeek-V4.1-Flash architecture."""

__version__ = "0.1.0"
