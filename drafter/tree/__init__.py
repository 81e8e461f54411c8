"""Draft trees: growth, pruning, scores, samples, budgets."""
