"""The engine as the service sees it: its client, its processes, their placement, restarts and liveness."""
