"""`secateur plan`: placement and memory of an engine, its predicted speed and tree sizes."""
