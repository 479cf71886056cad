"""What Prometheus reads: the engine's counts, what speculation did, and what each request lived through."""
