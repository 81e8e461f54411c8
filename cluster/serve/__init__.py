"""The service on Ray: the Serve application, the actors of its ranks, their placement. Alone imports Ray."""
