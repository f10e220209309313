"""Speech to text: recordings decoded, and computed one after another."""
