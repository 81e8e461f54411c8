"""`python -m tests.cluster.serve.deploy_across ADDRESS CONFIG` deploys a service at RAY_ADDRESS.

ADDRESS: of this node; its proxy gets the requests. CONFIG: the arguments of the application, as JSON.

It prints `ready`, and for each line of its standard input, such as `plain 20` or `resuming 120`, an answer of so many
tokens: the first line tells that it has begun, the second has its tokens. A plain request fails when its connection
breaks. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import serve as ray_serve

from cluster.serve import proxy
from cluster.serve.app import APP_NAME, build
from secateur import Client
from secateur.config import AppArgs

PORT = 8000
ASKED = {"prompt": "def f(", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CLIENTS: dict[str, dict[str, Any]] = {"plain": {"retries": 0, "outage_timeout": 0}, "resuming": {}}


def main() -> None:
    address, config = sys.argv[1:]
    ray.init(_node_ip_address=address)
    ray_serve.start(
        proxy_location="EveryNode",
        http_options={"host": "0.0.0.0", "port": PORT},  # each node is in a network namespace of its own
        controller_options={"runtime_env": {"env_vars": proxy.environment()}},
    )
    ray_serve.run(build(AppArgs.load(json.loads(config))), name=APP_NAME, route_prefix="/")
    print("ready", flush=True)
    for line in sys.stdin:
        kind, num_tokens = line.split()
        tokens: list[int] = []
        with Client(f"http://{address}:{PORT}", **CLIENTS[kind]) as client:
            for chunk in client.stream_complete(**ASKED, max_tokens=int(num_tokens)):
                if not tokens:
                    print("begun", flush=True)
                for choice in chunk.choices:
                    tokens += choice.token_ids or []
        print(json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main()
