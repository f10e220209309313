"""The colors of all charts: eager PyTorch, this package, and this package where it is slower."""

from __future__ import annotations

EAGER_COLOR, OURS_COLOR, SLOWER_COLOR = "#9aa5b1", "#2f7ebc", "#c0392b"
