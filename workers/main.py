"""Command line shared by `python -m verifier` and `python -m drafter`: one rank as a plain process, without Ray."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

import torch

from workers.comm import groups
from workers.config import EngineConfig
from workers.logs import log_as
from workers.models.specs import Specs


def main(run: Callable[..., None], description: str) -> None:
    """Parse the arguments and run one rank until the engine stops.

    Rank 0 takes --front and opens the rendezvous store, whose address it prints as `store HOST:PORT`. Every other rank
    takes --store.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rank", type=int, required=True, help="world rank: verifiers first, then drafters")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--specs", required=True, help="Specs of its checkpoints as JSON")
    parser.add_argument("--store", help="rendezvous address HOST:PORT printed by rank 0")
    parser.add_argument("--front", help="rank 0 only: unix:/path or tcp:host:port of the service front")
    parser.add_argument("--host", default="127.0.0.1", help="rank 0 only: address the store listens on")
    args = parser.parse_args()
    if (args.rank == 0) != (args.front is not None) or (args.rank == 0) == (args.store is not None):
        parser.error("rank 0 takes --front and no --store; every other rank takes --store and no --front")
    config = EngineConfig.from_json(args.config)
    specs = Specs.from_json(args.specs)
    log_as(config.role_of(args.rank))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(1 if config.device == "cpu" else torch.get_num_threads())
    if args.rank == 0:
        store, address = groups.open_store(args.host)
        print(f"store {address}", flush=True)
        run(config, specs, args.rank, address, front=args.front, on_joined=store.stop_listening)
        del store  # the rendezvous lives as long as rank 0 runs
    else:
        run(config, specs, args.rank, args.store)
