"""Semantic search with MiniLM on a CPU, with and without hf_cpu_accel.

python app.py  # http://127.0.0.1:7860
"""

from __future__ import annotations

import gradio as gr
from search import DTYPES, MOST_LETTERS, PASSAGES, checked_query, load, measure, passages_of, search

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
    """The page around two copies of the model."""
    pair = Pair(load())

    def answer(query: str, text: str, dtype: str) -> tuple:
        query, passages = checked_query(query), passages_of(text)
        plan = pair.use(dtype)
        found = search(pair, query, passages)
        rows = [[row.passage, f"{row.accelerated:.3f}", f"{row.eager:.3f}"] for row in found]
        nearest = table(("Nearest passages", "Accelerated", "PyTorch"), rows)
        return nearest, *Results.values(measure(pair, passages), plan, code(dtype))

    with gr.Blocks(title="Semantic search on a CPU") as blocks:
        gr.Markdown(
            "# Semantic search on a CPU\nAsk for a meaning, not for words. The passages are embedded twice: by PyTorch as it is, "
            "and with one line of hf_cpu_accel."
        )
        query = gr.Textbox(
            QUERIES[0], label="What are you looking for?", max_length=MOST_LETTERS, elem_id="query"
        )
        gr.Examples([[text] for text in QUERIES], query, label="For example")
        with gr.Accordion("The passages: edit them", open=False):
            text = gr.Textbox(
                "\n".join(PASSAGES),
                lines=8,
                max_lines=12,
                show_label=False,
                container=False,
                elem_id="passages",
            )
        dtype = gr.Radio(
            DTYPES, value="auto", label="Numbers that the accelerated model computes with", elem_id="dtype"
        )
        button = gr.Button("Search", variant="primary", elem_id="run")
        nearest = gr.HTML(elem_id="found")
        results = Results(code("auto"))
        gr.on(
            [button.click, query.submit],
            with_clear_errors(answer),
            [query, text, dtype],
            [nearest, *results.outputs],
            concurrency_id="model",
            show_progress_on=results.sentence,  # and the word "Error", which stands on every output else
            api_name="search",
        )
    return blocks


if __name__ == "__main__":
    run(page())
