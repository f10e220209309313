"""Explore a graph and the classes that a graph neural network gives its nodes, with and without hf_cpu_accel.

python app.py  # http://127.0.0.1:7860
"""

from __future__ import annotations

import gradio as gr
from drawing import draw, node_at
from graphs import NAMES, Node, explore, measure, node_of

from hf_cpu_accel import explain
from hf_cpu_accel.serve.space import Results, run, table, with_clear_errors

CODE = "model = GCN(32, 64, num_layers=2, out_channels=8).eval()\naccelerate_for_cpu(model)"
SHOWN = 3  # classes of a node


def page() -> gr.Blocks:
    """Return the page for both graphs and their models."""
    explorers = {name: explore(name) for name in NAMES}

    def choose(name: str, number: float) -> tuple:
        explorer = explorers.get(name) or explore(name)
        node = node_of(explorer, int(number))
        plan = explain(explorer.pair.accelerated)
        values = Results.values(measure(explorer), plan, CODE)
        return draw(explorer, node), description(node), classes(node), *values

    def click(name: str, number: float, event: gr.SelectData) -> int:
        return node_at(node_of(explorers[name], int(number)), *event.index)

    with gr.Blocks(title="Graph explorer on a CPU") as blocks:
        gr.Markdown(
            "# Graph explorer on a CPU\nTwo copies of a GCN classify all nodes of a graph: one in PyTorch (eager), one accelerated "
            "with one line of hf_cpu_accel. The Space trains the GCN at startup. Choose a node, or click a neighbor."
        )
        name = gr.Radio(NAMES, value=NAMES[0], label="Graph", elem_id="graph")
        number = gr.Number(0, label="Node", precision=0, minimum=0, elem_id="node")
        button = gr.Button("Show node", variant="primary", elem_id="run")
        with gr.Row():
            picture = gr.Image(
                label="Neighbors",
                format="png",
                interactive=False,
                buttons=[],
                elem_id="picture",
            )
            with gr.Column():
                text = gr.Markdown(elem_id="told")
                probabilities = gr.HTML(elem_id="classes")
        results = Results(CODE)
        outputs = [picture, text, probabilities, *results.outputs]
        settings = {"concurrency_id": "model", "show_progress_on": results.sentence}
        button.click(with_clear_errors(choose), [name, number], outputs, api_name="look", **settings)
        clicked = picture.select(
            click, [name, number], number, api_visibility="private", concurrency_id="model"
        )
        clicked.then(with_clear_errors(choose), [name, number], outputs, api_visibility="private", **settings)
        # In the browser, because an answer of the server could overwrite a number that the visitor is typing.
        name.change(None, None, number, js="() => 0", api_visibility="private")
    return blocks


def description(node: Node) -> str:
    """Return a description of the node and of its predicted class."""
    predicted, probability = int(node.accelerated.argmax()), float(node.accelerated.max())
    drawn = "" if len(node.neighbors) == node.degree else f", {len(node.neighbors)} of them drawn"
    return (
        f"**Node {node.number}** has class {node.label} and {node.degree} neighbors{drawn}. "
        f"The model predicts class {predicted} with a probability of {probability:.0%}."
    )


def classes(node: Node) -> str:
    """Return a table of the most probable classes and their probabilities from both models."""
    best = node.accelerated.argsort(descending=True)[:SHOWN].tolist()
    rows = [[str(label), f"{node.accelerated[label]:.4f}", f"{node.eager[label]:.4f}"] for label in best]
    return table(("Class", "Accelerated", "PyTorch (eager)"), rows)


if __name__ == "__main__":
    run(page())
