"""Configuration: frozen values, parsed and validated once at the door, torch-free."""
