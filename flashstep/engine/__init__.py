"""Joins scheduler and runner: in one process for offline use, or overlapped behind the wire."""
