"""`import_path: cluster.app:build`, the name that Serve configurations write; see `cluster.serve.app`."""

from cluster.serve.app import build

__all__ = ["build"]
