"""`secateur bench`: measurements on real engines, as plain processes of this machine."""

import os

from cluster.seats import HUGE_PAGES

os.environ |= HUGE_PAGES  # transformers computes in this very process: its weights shall lie as well as ours
