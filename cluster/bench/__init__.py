"""`secateur bench`: measurements of real engines, run as processes on this machine.

transformers runs in this process, so it gets the same allocator settings as our workers, as far as they can be set
after start-up. Huge pages for small blocks cannot; `make bench` sets them in the environment.
"""

import ctypes
import os
import sys

from cluster.rank_placement import HUGE_PAGES, KEPT_BLOCK_BYTES, KEPT_BYTES

os.environ |= HUGE_PAGES
if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    libc.mallopt(_M_TRIM_THRESHOLD := -1, KEPT_BYTES)
    libc.mallopt(_M_MMAP_THRESHOLD := -3, KEPT_BLOCK_BYTES)
