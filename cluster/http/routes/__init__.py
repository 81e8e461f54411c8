"""The routes of the service, by resource. Each module adds its own to an application."""
