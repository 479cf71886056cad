"""DeepSeek-V4.1 as modules; open ``transformer.py`` first."""
