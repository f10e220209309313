"""What services and their parts do under load."""
