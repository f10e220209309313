"""docs/reference/tasks.md is what the plans say."""

from __future__ import annotations

import torch

from tests.tasks.table import PAGE, page


def test_the_page_is_what_is_generated() -> None:
    torch.set_num_threads(1)
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs-tasks`"
