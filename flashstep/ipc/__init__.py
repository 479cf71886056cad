"""What crosses the border between the server process and an engine process (torch-free)."""
