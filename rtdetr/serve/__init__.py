"""Detection over HTTP: the application, batching, metrics and the page."""
