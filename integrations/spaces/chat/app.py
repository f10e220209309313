"""A chat with SmolLM2-135M on a CPU, with and without hf_cpu_accel.

python app.py  # http://127.0.0.1:7860
"""

from __future__ import annotations

from collections.abc import Iterator

import gradio as gr
from chat import DTYPES, MOST_CHARACTERS, MOST_NEW_TOKENS, agreement, compare, conversation_of, load, stream

from hf_cpu_accel.serve.comparison import Pair
from hf_cpu_accel.serve.space import Results, run, with_clear_errors

QUESTIONS = (
    "Why is the sky blue?",
    "Give me three uses of an old newspaper.",
    "What is the capital of France?",
)
EVERY = 4  # tokens between two updates of the page


def code(dtype: str) -> str:
    return (
        'model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")\n'
        f'accelerate_for_cpu(model, dtype="{dtype}")'
    )


def page() -> gr.Blocks:
    """Return the page for two copies of the model."""
    model, tokenizer = load()
    pair = Pair(model)

    def answer(message: str, history: list, dtype: str, new_tokens: int, again: bool) -> Iterator[tuple]:
        conversation = conversation_of(history, message, int(new_tokens), tokenizer)
        plan = pair.use(dtype)
        unchanged = [gr.skip()] * 5
        for accelerated in stream(pair.accelerated, tokenizer, conversation, int(new_tokens)):
            if len(accelerated.tokens) % EVERY == 1:
                yield "", [*conversation, reply(accelerated.text)], "", *unchanged
        history = [*conversation, reply(accelerated.text)]
        yield "", history, "", *unchanged
        if not again:
            return
        for eager in stream(pair.eager, tokenizer, conversation, int(new_tokens)):
            if len(eager.tokens) % EVERY == 1:
                yield "", history, eager.text, *unchanged
        text = f"{eager.text}\n\n*{agreement(eager, accelerated)}*"
        yield "", history, text, *Results.values(compare(eager, accelerated), plan, code(dtype))

    with gr.Blocks(title="Chat on a CPU") as blocks:
        gr.Markdown(
            "# Chat on a CPU\nSmolLM2 with 135 million parameters answers twice: first accelerated with one line of hf_cpu_accel, "
            "then in PyTorch (eager). The answers are streamed. The model is small, so its answers are often wrong."
        )
        history = gr.Chatbot(label="Accelerated", height=320, buttons=["copy"], elem_id="history")
        with gr.Accordion("Last answer in PyTorch (eager)", open=True):
            eager = gr.Markdown(elem_id="eager", min_height=60)
        message = gr.Textbox(
            QUESTIONS[0], label="Your message", max_length=MOST_CHARACTERS, elem_id="message"
        )
        with gr.Row():
            button = gr.Button("Send", variant="primary", elem_id="run")
            clear = gr.Button("New conversation", elem_id="clear")
        gr.Examples([[text] for text in QUESTIONS], message, label="Examples")
        dtype = gr.Radio(DTYPES, value="auto", label="dtype of the accelerated model", elem_id="dtype")
        new_tokens = gr.Slider(
            1, MOST_NEW_TOKENS, value=48, step=1, label="Maximum new tokens", elem_id="tokens"
        )
        again = gr.Checkbox(True, label="Compare with PyTorch (eager)", elem_id="again")
        results = Results(code("auto"))
        gr.on(
            [button.click, message.submit],
            with_clear_errors(answer),
            [message, history, dtype, new_tokens, again],
            [message, history, eager, *results.outputs],
            concurrency_id="model",
            show_progress_on=history,  # without it every output shows the progress and the word "Error"
            api_name="chat",
        )
        clear.click(lambda: ([], ""), None, [history, eager], api_visibility="private")
    return blocks


def reply(text: str) -> dict[str, str]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    run(page())
