"""The adaptive controller of `auto`: whether and for whom to draft, from what past steps took and brought."""
