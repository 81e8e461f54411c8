"""`python -m tests.cluster.serve.deploy_across` connects to RAY_ADDRESS and deploys an engine that needs two nodes.

It prints `ready`, and for each line of its standard input the answer to a request: the first line tells that it has
begun, the second has its tokens. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve as ray_serve

from cluster.serve import proxy
from cluster.serve.app import APP_NAME, build
from secateur import Client
from secateur.config import AppArgs

PORT = 8000
BUNDLES = [{"CPU": 1.0, "head": 0.1}, {"CPU": 1.0, "other": 0.1}]
"""Verifier 0 and the replica on a node that has `head`, verifier 1 on one that has `other`."""
ASKED = {"prompt": "def f(", "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 400}


def main() -> None:
    app = AppArgs.load(
        {
            "engine_kwargs": {"device": "cpu", "tensor_parallel_size": 2, "no_speculation": True},
            "placement_group_config": {"strategy": "PACK", "bundles": BUNDLES},
            "deployment_config": {"graceful_shutdown_timeout_s": 1.0},
        }
    )
    ray.init()
    address = ray.util.get_node_ip_address()
    ray_serve.start(
        proxy_location="HeadOnly",
        http_options={"host": address, "port": PORT},
        controller_options={"runtime_env": {"env_vars": proxy.environment()}},
    )
    ray_serve.run(build(app), name=APP_NAME, route_prefix="/")
    print("ready", flush=True)
    with Client(f"http://{address}:{PORT}") as client:
        for _ in sys.stdin:
            tokens: list[int] = []
            for chunk in client.stream_complete(**ASKED):
                if not tokens:
                    print("begun", flush=True)
                for choice in chunk.choices:
                    tokens += choice.token_ids or []
            print(json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main()
