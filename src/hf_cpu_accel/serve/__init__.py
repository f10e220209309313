"""Serving: batches from the requests of many clients, engines for language models, instances, and the HTTP server."""
