"""Load over HTTP: requests to any OpenAI-compatible server, when they are sent, and what their answers' times say."""
