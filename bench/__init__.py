"""Measurements for developers: `python -m bench.NAME` in a checkout. They report and never assert on time.

transformers and single forwards run in this process, so it gets the same allocator settings as our workers, as far as
they can be set after start-up. Huge pages for small blocks cannot; `make bench` sets them in the environment.
"""

import ctypes
import os
import sys

from cluster.engine.rank_placement import HUGE_PAGES, KEPT_BLOCK_BYTES, KEPT_BYTES

os.environ |= HUGE_PAGES
if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    libc.mallopt(_M_TRIM_THRESHOLD := -1, KEPT_BYTES)
    libc.mallopt(_M_MMAP_THRESHOLD := -3, KEPT_BLOCK_BYTES)
