"""Measurements for developers: `python -m bench.NAME` in a checkout. They report and never assert on time."""
