"""The server under load: what many clients get, and how long each waits."""
