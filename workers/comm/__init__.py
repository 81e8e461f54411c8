"""What travels between processes: wire format, process groups, channels, the engine's socket."""
