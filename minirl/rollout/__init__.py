"""The engine side: servers, routing, workers, and how weights reach the engines."""
