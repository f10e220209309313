"""The HTTP server, with the endpoints of text-embeddings-inference and OpenAI."""
