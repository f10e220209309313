"""Helpers for Hugging Face Spaces: the results on a page, a server, a health check and a queue. Nothing calls other machines.

Only these functions import Gradio, which is in the extra `spaces`.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from hf_cpu_accel.measure import environment
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.serve.comparison import PLAN_COLUMNS, Comparison, plan_rows, plan_sentence

if TYPE_CHECKING:
    import gradio as gr
    from fastapi import FastAPI

PORT = 7860  # the port of apps in Spaces
WAITING = 20  # requests that may wait for the model; more are rejected
_SANS, _MONO = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # local fonts, not downloaded
_CSS = """
.rows table {width: 100%; font-size: 0.85em; border-collapse: collapse}
.rows td, .rows th {padding: 4px 6px; text-align: left; vertical-align: top; border: 1px solid var(--border-color-primary)}
.rows td, .rows th {overflow-wrap: break-word; hyphens: auto}
"""


class Results:
    """The components below a demo: the speedup, the chart, the code, and the plan as a table. Create it inside `gr.Blocks`."""

    def __init__(self, code: str) -> None:
        import gradio as gr

        self.sentence = gr.Markdown("*Run the demo to see the speedup.*", elem_id="sentence")
        self.chart = gr.Plot(show_label=False, elem_id="chart")
        self.code = gr.Code(
            code,
            language="python",
            label="Code",
            lines=1,
            wrap_lines=True,
            interactive=False,
            elem_id="code",
        )
        with gr.Accordion("Plan: output of explain(model)", open=False):
            self.summary = gr.Markdown(elem_id="summary")
            self.plan = gr.HTML(elem_id="plan")

    @property
    def outputs(self) -> list[gr.components.Component]:
        """Return the components in the order of `values`."""
        return [self.sentence, self.chart, self.code, self.summary, self.plan]

    @staticmethod
    def values(comparison: Comparison, plan: Plan, code: str) -> tuple[Any, ...]:
        """Return the values of the components for a comparison."""
        return (
            f"**{comparison}**",
            comparison.chart(),
            code,
            plan_sentence(plan),
            table(PLAN_COLUMNS, plan_rows(plan)),
        )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of text whose lines wrap on narrow screens.

    Args:
        head: the column headings.
        rows: the cells of each row.
    """

    def row(cells: Sequence[str], tag: str) -> str:
        # Class names may break before capitals.
        texts = (re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", escape(cell)) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="rows"><table><thead>{row(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def with_clear_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` for a Gradio event: visitors see the message of its ValueError."""
    import gradio as gr

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def stream(*arguments: Any) -> Iterator[Any]:
            try:
                yield from function(*arguments)
            except ValueError as error:
                raise gr.Error(str(error), duration=None, print_exception=False) from error

        return stream

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ValueError as error:
            raise gr.Error(str(error), duration=None, print_exception=False) from error

    return call


def application(blocks: gr.Blocks, *, max_file_size: str = "5mb") -> FastAPI:
    """Return the app with the page on `/` and a health check on `/health`. Requests run one at a time; others wait.

    Args:
        blocks: the page.
        max_file_size: maximum size of an upload, such as "5mb".
    """
    import gradio as gr
    from fastapi import FastAPI

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, object]:
        facts = environment.environment()
        return {"status": "ok", "kernels": facts["kernels"], "tier": facts["tier"], "cores": facts["cores"]}

    blocks.analytics_enabled = False
    blocks.queue(max_size=WAITING, default_concurrency_limit=1)
    theme = gr.themes.Default(font=_SANS, font_mono=_MONO)
    return gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        theme=theme,
        css=_CSS,
        max_file_size=max_file_size,
        ssr_mode=False,
        show_error=True,
    )


def run(blocks: gr.Blocks, **settings: Any) -> None:
    """Serve `application(blocks, **settings)` until the process is stopped."""
    import uvicorn

    host, port = address(os.environ)
    print(f"http://{host}:{port}", flush=True)
    uvicorn.run(
        application(blocks, **settings), host=host, port=port, log_level="warning", forwarded_allow_ips="*"
    )


def address(variables: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and the port to listen on.

    The host is GRADIO_SERVER_NAME, or else 0.0.0.0 in a Space and 127.0.0.1 elsewhere. The port is the first of
    GRADIO_SERVER_PORT and PORT that is set, or else 7860.

    Raises:
        ValueError: a port that is not a whole number from 1 to 65535.
    """
    host = variables.get("GRADIO_SERVER_NAME") or ("0.0.0.0" if "SPACE_ID" in variables else "127.0.0.1")
    for name in ("GRADIO_SERVER_PORT", "PORT"):
        if text := variables.get(name):
            if not text.isdecimal() or not 0 < int(text) < 65536:
                raise ValueError(f"{name}={text!r}: accepted are whole numbers from 1 to 65535")
            return host, int(text)
    return host, PORT
