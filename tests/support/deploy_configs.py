"""`python -m tests.support.deploy_configs` starts a Ray on this machine and applies Serve configurations to it.

It reads the path of a YAML file per line and applies it as KubeRay does, through Serve's controller. It ends with its
standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from ray.serve._private.api import serve_start
from ray.serve.schema import ServeDeploySchema

from cluster.serve.ray_cluster import ray_cluster
from cluster.serve.signals import StopSignals
from cluster.system.progress import Progress


def main() -> None:
    with StopSignals() as signals, ray_cluster(None, signals, Progress()):
        for line in sys.stdin:
            config = ServeDeploySchema.model_validate(yaml.safe_load(Path(line.strip()).read_text()))
            client = serve_start(http_options=config.http_options.model_dump(), proxy_location=config.proxy_location)
            client.deploy_apps(config)
            print("applied", flush=True)


if __name__ == "__main__":
    main()
