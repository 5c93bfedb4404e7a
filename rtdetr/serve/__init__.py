"""Detection over HTTP: the app, the batches behind it, its figures and its page."""
