"""Round weights for calibration examples: run forwards of the original model, linear by linear, and round each."""
