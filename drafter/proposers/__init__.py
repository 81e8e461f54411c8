"""Proposers of draft tokens: draft models, EAGLE heads, multi-token prediction, n-gram lookup."""
