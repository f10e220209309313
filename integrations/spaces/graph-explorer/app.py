"""A graph neural network to look into, on a CPU, with and without hf_cpu_accel.

python app.py  # http://127.0.0.1:7860
"""

from __future__ import annotations

import gradio as gr
from drawing import draw, node_at
from graphs import NAMES, Node, explore, look, measure

from hf_cpu_accel import explain
from hf_cpu_accel.serve.space import Results, run, table, with_clear_errors

CODE = "model = GCN(32, 64, num_layers=2, out_channels=8).eval()\naccelerate_for_cpu(model)"
SHOWN = 3  # classes of a node


def page() -> gr.Blocks:
    """The page around both graphs and their models."""
    explorers = {name: explore(name) for name in NAMES}

    def choose(name: str, number: float) -> tuple:
        explorer = explorers.get(name) or explore(name)
        node = look(explorer, int(number))
        plan = explain(explorer.pair.accelerated)
        values = Results.values(measure(explorer), plan, CODE)
        return draw(explorer, node), described(node), classes(node), *values

    def click(name: str, number: float, event: gr.SelectData) -> int:
        return node_at(look(explorers[name], int(number)), *event.index)

    with gr.Blocks(title="Graph explorer on a CPU") as blocks:
        gr.Markdown(
            "# Graph explorer on a CPU\nA GCN, trained when this page was started, classifies every node of a graph: in "
            "PyTorch Geometric as it is, and with one line of hf_cpu_accel. Choose a node, or click on a neighbor."
        )
        name = gr.Radio(NAMES, value=NAMES[0], label="Graph", elem_id="graph")
        number = gr.Number(0, label="Node", precision=0, minimum=0, elem_id="node")
        button = gr.Button("Look at it", variant="primary", elem_id="run")
        with gr.Row():
            picture = gr.Image(
                label="Neighbors",
                format="png",
                interactive=False,
                buttons=[],
                elem_id="picture",
            )
            with gr.Column():
                told = gr.Markdown(elem_id="told")
                probable = gr.HTML(elem_id="classes")
        results = Results(CODE)
        outputs = [picture, told, probable, *results.outputs]
        settings = {"concurrency_id": "model", "show_progress_on": results.sentence}
        button.click(with_clear_errors(choose), [name, number], outputs, api_name="look", **settings)
        clicked = picture.select(
            click, [name, number], number, api_visibility="private", concurrency_id="model"
        )
        clicked.then(with_clear_errors(choose), [name, number], outputs, api_visibility="private", **settings)
        # By the browser, at once: an answer of the server's could come when another number is being typed.
        name.change(None, None, number, js="() => 0", api_visibility="private")
    return blocks


def described(node: Node) -> str:
    """The node in words."""
    guess, sure = int(node.accelerated.argmax()), float(node.accelerated.max())
    drawn = "" if len(node.neighbors) == node.degree else f", {len(node.neighbors)} of them drawn"
    return (
        f"**Node {node.number}** is of class {node.label} and has {node.degree} neighbors{drawn}. "
        f"The model says class {guess}, and is {sure:.0%} sure."
    )


def classes(node: Node) -> str:
    """The most probable classes, by both models."""
    best = node.accelerated.argsort(descending=True)[:SHOWN].tolist()
    rows = [[str(which), f"{node.accelerated[which]:.4f}", f"{node.eager[which]:.4f}"] for which in best]
    return table(("Class", "Accelerated", "PyTorch"), rows)


if __name__ == "__main__":
    run(page())
