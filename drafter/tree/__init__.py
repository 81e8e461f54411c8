"""Draft trees: growth, pruning, scoring, sampling, cost model."""
