"""`python -m drafter`: one drafter rank as a plain process."""

from drafter.worker import run
from workers.main import main

if __name__ == "__main__":
    main(run, "One drafter rank of an engine.")
