"""The service on Ray: the Serve application, its worker actors and their placement. Only this package imports Ray."""
