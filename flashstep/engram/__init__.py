"""The n-gram tables: which rows a token looks up, and where the rows live. The token map is torch-free; import it by module."""
