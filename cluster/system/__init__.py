"""Processes, temporary folders and sockets of this machine."""
