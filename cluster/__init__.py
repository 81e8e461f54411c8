"""The HTTP service, its engines and their placement: the only package that imports Ray or FastAPI."""
