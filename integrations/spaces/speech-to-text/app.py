"""Speech to text with whisper-tiny on a CPU, with and without hf_cpu_accel.

python app.py  # http://127.0.0.1:7860
"""

from __future__ import annotations

from typing import Any

import gradio as gr
from speech import DTYPES, LONGEST, SAMPLE, load, measure, samples_of, transcribe

from hf_cpu_accel.serve.comparison import ACCELERATED, EAGER, Pair
from hf_cpu_accel.serve.space import Results, run, table, with_clear_errors


def code(dtype: str) -> str:
    return (
        'recognizer = pipeline("automatic-speech-recognition", "openai/whisper-tiny", device="cpu")\n'
        f'accelerate_for_cpu(recognizer, dtype="{dtype}")'
    )


def page() -> gr.Blocks:
    """Return the page for two copies of the model."""
    pair = Pair(load())

    def answer(recording: Any, dtype: str) -> tuple:
        samples = samples_of(recording)
        plan = pair.use(dtype)
        texts = [
            [name, transcribe(model, samples)]
            for name, model in ((ACCELERATED, pair.accelerated), (EAGER, pair.eager))
        ]
        return table(("Model", "Text"), texts), *Results.values(measure(pair, samples), plan, code(dtype))

    with gr.Blocks(title="Speech to text on a CPU") as blocks:
        gr.Markdown(
            f"# Speech to text on a CPU\nRecord speech or choose a file of at most {LONGEST:g} seconds. Two copies of whisper-tiny "
            "transcribe it: one in PyTorch (eager), one accelerated with one line of hf_cpu_accel."
        )
        recording = gr.Audio(
            str(SAMPLE),
            sources=["microphone", "upload"],
            type="numpy",
            label="Recording",
            elem_id="recording",
        )
        dtype = gr.Radio(DTYPES, value="auto", label="dtype of the accelerated model", elem_id="dtype")
        button = gr.Button("Transcribe", variant="primary", elem_id="run")
        texts = gr.HTML(elem_id="texts")
        results = Results(code("auto"))
        button.click(
            with_clear_errors(answer),
            [recording, dtype],
            [texts, *results.outputs],
            concurrency_id="model",
            show_progress_on=results.sentence,  # without it every output shows the progress and the word "Error"
            api_name="transcribe",
        )
    return blocks


if __name__ == "__main__":
    run(page(), max_file_size="20mb")
