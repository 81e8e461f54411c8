"""`secateur bench`: measurements on real engines, as plain processes of this machine."""
