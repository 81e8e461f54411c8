"""OpenAI's objects: request parameters to the engine's messages, tokens to answers and events."""
