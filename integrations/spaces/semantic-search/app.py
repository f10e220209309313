"""Semantic search with MiniLM on a CPU, with and without hf_cpu_accel.

python app.py  # http://127.0.0.1:7860
"""

from __future__ import annotations

import gradio as gr
from search import DTYPES, MOST_CHARACTERS, PASSAGES, load, measure, passages_of, query_of, search

from hf_cpu_accel.serve.comparison import Pair
from hf_cpu_accel.serve.space import Results, run, table, with_clear_errors

QUERIES = (
    "How do I repair a punctured wheel?",
    "medicine for a high temperature",
    "when do I get my money back?",
)


def code(dtype: str) -> str:
    return f'model = SentenceTransformer("all-MiniLM-L6-v2")\naccelerate_for_cpu(model, dtype="{dtype}")'


def page() -> gr.Blocks:
    """Return the page for two copies of the model."""
    pair = Pair(load())

    def answer(query: str, text: str, dtype: str) -> tuple:
        query, passages = query_of(query), passages_of(text)
        plan = pair.use(dtype)
        matches = search(pair, query, passages)
        rows = [[match.passage, f"{match.accelerated:.3f}", f"{match.eager:.3f}"] for match in matches]
        nearest = table(("Nearest passages", "Accelerated", "PyTorch (eager)"), rows)
        return nearest, *Results.values(measure(pair, passages), plan, code(dtype))

    with gr.Blocks(title="Semantic search on a CPU") as blocks:
        gr.Markdown(
            "# Semantic search on a CPU\nSearch passages by meaning instead of by words. Two copies of MiniLM embed them: "
            "one in PyTorch (eager), one accelerated with one line of hf_cpu_accel."
        )
        query = gr.Textbox(QUERIES[0], label="Query", max_length=MOST_CHARACTERS, elem_id="query")
        gr.Examples([[text] for text in QUERIES], query, label="Examples")
        with gr.Accordion("Passages (editable)", open=False):
            text = gr.Textbox(
                "\n".join(PASSAGES),
                lines=8,
                max_lines=12,
                show_label=False,
                container=False,
                elem_id="passages",
            )
        dtype = gr.Radio(DTYPES, value="auto", label="dtype of the accelerated model", elem_id="dtype")
        button = gr.Button("Search", variant="primary", elem_id="run")
        nearest = gr.HTML(elem_id="found")
        results = Results(code("auto"))
        gr.on(
            [button.click, query.submit],
            with_clear_errors(answer),
            [query, text, dtype],
            [nearest, *results.outputs],
            concurrency_id="model",
            show_progress_on=results.sentence,  # without it every output shows the progress and the word "Error"
            api_name="search",
        )
    return blocks


if __name__ == "__main__":
    run(page())
