"""What every GPU process of Secateur is made of: the shared nouns, the wire, models, KV pages, sampling."""
