"""`python -m verifier`: one verifier rank as a plain process."""

from verifier.worker import run
from workers.main import main

if __name__ == "__main__":
    main(run, "One verifier rank of an engine; rank 0 also runs the engine loop.")
