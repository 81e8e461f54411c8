"""Communication between processes: wire format, process groups, channels and the engine's socket."""
