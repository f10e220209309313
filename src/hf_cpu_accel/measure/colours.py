"""The colours of all charts: eager PyTorch, this package, and this package where it is slower."""

from __future__ import annotations

EAGER_COLOUR, OURS_COLOUR, SLOWER_COLOUR = "#9aa5b1", "#2f7ebc", "#c0392b"
