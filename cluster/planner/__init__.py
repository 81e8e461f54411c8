"""`secateur plan`: where an engine would go, what its steps take and bring, how large trees should be, whole fleets."""
