"""Write the table of classes in docs/reference/task-classes.md: `make docs-tasks`."""

from __future__ import annotations

from pathlib import Path

from hf_cpu_accel.frontends.tasks import DIFFUSION, TASKS, Task

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "task-classes.md"
_HEAD = "| Class | Loads with | In the pipelines |\n| --- | --- | --- |\n"


def table() -> str:
    rows = [_row(task) for task in TASKS]
    rows += [f"| `{name}` | `diffusers.{loader}` |  |" for name, loader in DIFFUSION.items()]
    return _HEAD + "\n".join(rows) + "\n"


def _row(task: Task) -> str:
    name, *aliases = (f"`{name}`" for name in task.class_names)
    names = f"{name}, also {', '.join(aliases)}" if aliases else name
    return f"| {names} | `{task.auto_class}` | {', '.join(task.pipelines)} |"


def page() -> str:
    """Return the page with a new table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_HEAD)
    return before + table() + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
