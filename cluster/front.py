"""One of several fronts, `python -m cluster.front`: reads what to serve from stdin, and writes a line when it does.

It ends at SIGTERM, when running answers have ended. An engine that is lost is replaced by the process that started
this one, so requests wait for the next. A second line on stdin says why there is none.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, cast

import uvloop

from cluster.convert import load_tokenizer
from cluster.engine.engine_client import EngineClient
from cluster.engine.neighbours import Neighbours
from cluster.http.admission import PENDING_PER_PLACE
from cluster.local_service import build_service, http_server
from cluster.system.cores import num_cores
from cluster.system.shared import Shared
from cluster.text.tokenizer_pool import MAX_WORKERS, TokenizerPool
from secateur.config import EngineArgs
from secateur.logs import VARIABLE, Level, set_log_level
from workers.config import EngineConfig


async def serve(told: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    args, config = EngineArgs.load(told["args"]), EngineConfig.from_json(told["config"])
    shared = Shared(Path(told["folder"]), told["number"], told["num_fronts"])
    # With priorities the service holds twice as many as without.
    neighbours = Neighbours(shared, 2 * PENDING_PER_PLACE * config.max_num_seqs)
    client = EngineClient(cause_wait_s=0.0, neighbours=neighbours)
    client.on_loss = client.interrupt
    asyncio.get_running_loop().add_reader(0, lambda: client.fail(sys.stdin.readline().strip()))
    tokenizer = load_tokenizer(args, config)
    await client.listen(f"unix:{told['folder']}/{told['number']}.sock")
    num_workers = max(1, min(MAX_WORKERS, num_cores()) // shared.num_fronts)
    async with TokenizerPool(tokenizer, num_workers=num_workers) as pool:
        await client.wait_ready(config.startup_timeout_s)
        await pool.ready()
        service = build_service(args, config, client, tokenizer, pool, replica="local", shared=shared)
        server = http_server(args, service, grace_s=args.shutdown_timeout)
        serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=told["socket"])]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        print(flush=True)
        await serving
    await client.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn handles it while it serves, and raises it again afterwards
    set_log_level(cast(Level | None, os.environ.get(VARIABLE)))
    uvloop.run(serve(json.loads(sys.stdin.readline())))
