"""Draw digits with a small diffusion model on a CPU, with and without hf_cpu_accel.

python app.py  # http://127.0.0.1:7860
"""

from __future__ import annotations

import gradio as gr
from drawing import DIGITS, MOST_IMAGES, MOST_STEPS, draw, load, measure, sheet

from hf_cpu_accel.serve.comparison import Pair
from hf_cpu_accel.serve.space import Results, run, with_clear_errors

DTYPES = ("auto", "float32", "bfloat16", "int8")


def code(dtype: str) -> str:
    return f'unet = UNet2DModel.from_pretrained("unet")\naccelerate_for_cpu(unet, dtype="{dtype}")'


def page() -> gr.Blocks:
    """Return the page for two copies of the UNet."""
    pair = Pair(load())

    def answer(digit: float, count: float, steps: float, seed: float, dtype: str) -> tuple:
        plan = pair.use(dtype)
        settings = (int(digit), int(count), int(steps), int(seed))
        images = [sheet(draw(model, *settings)) for model in (pair.accelerated, pair.eager)]
        return *images, *Results.values(measure(pair, *settings), plan, code(dtype))

    with gr.Blocks(title="Image generation on a CPU") as blocks:
        gr.Markdown(
            "# Image generation on a CPU\nTwo copies of a small diffusion model draw handwritten digits from the same noise: "
            "one in PyTorch (eager), one accelerated with one line of hf_cpu_accel. `train.py` in this folder trains the model."
        )
        digit = gr.Slider(0, DIGITS - 1, value=3, step=1, label="Digit", elem_id="digit")
        count = gr.Slider(1, MOST_IMAGES, value=4, step=1, label="Images", elem_id="images")
        steps = gr.Slider(1, MOST_STEPS, value=20, step=1, label="Denoising steps", elem_id="steps")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="seed")
        dtype = gr.Radio(DTYPES, value="auto", label="dtype of the accelerated model", elem_id="dtype")
        button = gr.Button("Draw", variant="primary", elem_id="run")
        with gr.Row():
            accelerated, eager = (
                image_below(title, name)
                for title, name in (("Accelerated", "accelerated"), ("PyTorch (eager)", "eager"))
            )
        results = Results(code("auto"))
        button.click(
            with_clear_errors(answer),
            [digit, count, steps, seed, dtype],
            [accelerated, eager, *results.outputs],
            concurrency_id="model",
            show_progress_on=results.sentence,  # without it every output shows the progress and the word "Error"
            api_name="draw",
        )
    return blocks


def image_below(title: str, name: str) -> gr.Image:
    """Return an image component in its own column; phones show columns below each other."""
    with gr.Column(min_width=300):
        gr.Markdown(f"**{title}**")
        return gr.Image(
            show_label=False,
            format="png",
            type="pil",
            interactive=False,
            buttons=[],
            height=220,
            elem_id=name,
        )


if __name__ == "__main__":
    run(page())
