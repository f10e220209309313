"""Speech recognition: recordings are decoded and transcribed one after another."""
