"""`secateur bench`: measurements of a service, and of engines that run as processes on this machine."""
