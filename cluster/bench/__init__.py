"""`secateur bench`: measurements on real engines, as plain processes of this machine.

transformers computes in this very process: it is given memory as our workers have it, as far as that can be had once a
process has started. Small blocks in huge pages cannot: `make bench` starts with them.
"""

import ctypes
import os
import sys

from cluster.rank_placement import HUGE_PAGES, KEPT_BLOCK_BYTES, KEPT_BYTES

os.environ |= HUGE_PAGES
if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    libc.mallopt(_M_TRIM_THRESHOLD := -1, KEPT_BYTES)
    libc.mallopt(_M_MMAP_THRESHOLD := -3, KEPT_BLOCK_BYTES)
