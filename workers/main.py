"""Command line shared by `python -m verifier` and `python -m drafter`: one rank as a plain process, without Ray."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from workers.comm import groups
from workers.config import DRAFT_LINK_VARIABLE, PULSE_VARIABLE, EngineConfig
from workers.logs import log_as, name_process
from workers.models.specs import Specs
from workers.pulse import send_beats_if_asked


def main(run: Callable[..., None], description: str) -> None:
    """Parse the arguments and run one rank until the engine stops.

    Rank 0 takes --front and opens the rendezvous store, whose address it prints as `store HOST:PORT`; once all ranks
    have loaded their models, it prints `joined`. Every other rank takes --store. Drafters that replace lost ones are a
    world of their own: drafter 0 opens its store, and gets the address of verifier 0's link, which is a secret, from
    the environment.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rank", type=int, required=True, help="world rank: verifiers first, then drafters")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--specs", required=True, help="Specs of its checkpoints as JSON")
    parser.add_argument("--store", help="rendezvous address HOST:PORT printed by the first rank")
    parser.add_argument("--front", help="rank 0 only: unix:/path or tcp:host:port of the service front")
    parser.add_argument("--host", default="127.0.0.1", help="first rank only: address the store listens on")
    args = parser.parse_args()
    if (args.rank == 0) != (args.front is not None):
        parser.error("rank 0 takes --front, the other ranks do not")
    config = EngineConfig.from_json(args.config)
    specs = Specs.from_json(args.specs)
    link = os.environ.get(DRAFT_LINK_VARIABLE)
    own: dict[str, Any] = {} if link is None else {"link": link}
    opens_store = args.rank == (0 if link is None else config.tensor_parallel_size)
    if opens_store == (args.store is not None):
        parser.error("the first rank takes no --store, the other ranks do")
    log_as(config.role_of(args.rank))
    name_process(config.role_of(args.rank))
    send_beats_if_asked(PULSE_VARIABLE, args.rank)
    if config.device == "cpu":
        torch.set_num_threads(config.threads if args.rank < config.tensor_parallel_size else 1)
    with exit_on_sigterm():
        address, store = args.store, None
        if opens_store:
            store, address = groups.open_store(args.host)  # the rendezvous lives as long as this rank runs
            print(f"store {address}", flush=True)
            own["on_joined"] = partial(_joined, store)
        if args.rank == 0:
            own["front"] = args.front
        run(config, specs, args.rank, address, **own)
        del store


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block with exit status 0, wherever it arrives."""
    is_told = False

    def stop(*_: object) -> None:
        nonlocal is_told
        is_told = True
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Exception:
        if not is_told:  # C code that is interrupted may raise an error of its own instead, as slicing weights does
            raise


def _joined(store: groups.RendezvousStore) -> None:
    store.stop_listening()
    print("joined", flush=True)
