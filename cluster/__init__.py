"""Places, connects and answers: the only package that imports Ray or FastAPI."""
