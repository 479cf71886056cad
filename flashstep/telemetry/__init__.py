"""What the running system says of itself: structured log lines (torch-free)."""
