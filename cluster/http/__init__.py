"""The HTTP service over one engine: OpenAI's routes, prompts to tokens, tokens to answers. Knows FastAPI, not Ray."""
