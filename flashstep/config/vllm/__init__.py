"""vLLM's command line, as far as it concerns this engine: which of its flags work here, and what the others become."""
