"""Metrics, traces and the accounts of API keys."""
