"""Messages to token ids and token ids to messages, for this model only. Torch-free; knows no HTTP and no engine."""
