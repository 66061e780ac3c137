"""The HTTP server: its start and end, its application, request bodies and responses."""
