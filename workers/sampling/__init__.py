"""From logits to tokens: the processed distribution, counter-based noise, logits processors."""
