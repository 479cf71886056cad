"""OpenAI's Responses API: POST /v1/responses, and what becomes of a response by its id."""
