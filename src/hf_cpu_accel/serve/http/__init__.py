"""The HTTP server: text-embeddings-inference's and OpenAI's endpoints around the models in service."""
