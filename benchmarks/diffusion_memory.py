"""Measure the memory of Stable Diffusion 1.5 while it draws an image of 512 px: python -m benchmarks.diffusion_memory

Random weights in the published sizes, without the safety checker; each system in a process of its own. The memory does not
depend on the number of steps, so there are few.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import diffusers
import psutil
import torch
import transformers
import typer

from benchmarks.session import Threads, chosen_systems
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.tables import results_table, wide_console
from hf_cpu_accel.measure import PeakMemory
from hf_cpu_accel.runtime.memory import trim_heap

# The dtype of the loaded model, and the one it is accelerated with.
SYSTEMS: dict[str, tuple[torch.dtype, str | None]] = {
    "eager fp32": (torch.float32, None),
    "eager bf16": (torch.bfloat16, None),
    "ours fp32": (torch.float32, "float32"),
    "ours bf16": (torch.float32, "bfloat16"),
    "ours bf16 of bf16": (torch.bfloat16, "bfloat16"),
    "ours int8": (torch.float32, "int8"),
    "ours int8 of bf16": (torch.bfloat16, "int8"),
}
_HEADINGS = (
    "system",
    "model\nGB",
    "drawing\nGB more",
    "together\nGB",
    "of the\nfirst",
    "while\naccelerating\nGB more",
)


@dataclass(frozen=True)
class Result:
    """Bytes of resident memory.

    Attributes:
        model: the process with its libraries and the pipeline, before the first image.
        drawing: how much more the process held at most while it drew.
        accelerating: by how much accelerating the loaded pipeline raised it at most.
    """

    system: str
    model: int
    drawing: int
    accelerating: int

    @property
    def together(self) -> int:
        return self.model + self.drawing


def pipeline(dtype: torch.dtype) -> diffusers.DiffusionPipeline:
    """Return Stable Diffusion 1.5 with random weights, without a tokenizer."""
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(
        vocab_size=49408,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
    )
    models = {
        "text_encoder": transformers.CLIPTextModel(text),
        "unet": diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8),
        "vae": diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            sample_size=512,
        ),
    }
    return diffusers.StableDiffusionPipeline(
        **{name: model.to(dtype).eval() for name, model in models.items()},
        tokenizer=None,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def draw(pipe: diffusers.DiffusionPipeline, size: int, steps: int) -> None:
    """Draw one image with classifier-free guidance."""
    with torch.no_grad():
        prompts = pipe.text_encoder(torch.randint(49408, (2, 77)))[0]
    pipe(
        prompt_embeds=prompts[:1],
        negative_prompt_embeds=prompts[1:],
        height=size,
        width=size,
        num_inference_steps=steps,
        output_type="np",
    )


def measure(system: str, size: int, steps: int, threads: int | None) -> Result:
    """Measure in this process, which has to be a new one."""
    dtype, accelerated = SYSTEMS[system]
    if threads is not None:
        torch.set_num_threads(threads)
    pipe = pipeline(dtype)
    pipe.set_progress_bar_config(disable=True)
    with PeakMemory() as accelerating:
        if accelerated is not None:
            accelerate_for_cpu(pipe, dtype=accelerated, threads=threads)
    trim_heap()
    model = psutil.Process().memory_info().rss
    with PeakMemory() as drawing:
        draw(pipe, size, steps)
    return Result(system, model, drawing.peak_bytes or 0, accelerating.peak_bytes or 0)


def _measure_alone(system: str, size: int, steps: int, threads: int | None) -> Result:
    options = ["--size", str(size), "--steps", str(steps), "--here", "--systems", system]
    options += [] if threads is None else ["--threads", str(threads)]
    command = [sys.executable, "-m", "benchmarks.diffusion_memory", *options]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    return Result(**json.loads(run.stdout.splitlines()[-1]))


def main(
    systems: Annotated[str, typer.Option(help="Comma-separated systems.")] = ",".join(SYSTEMS),
    size: Annotated[int, typer.Option(min=64, help="Height and width of the image.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps; memory does not depend on them.")] = 2,
    threads: Threads = None,
    here: Annotated[
        bool, typer.Option(help="Measure one system in this process, and print a line of JSON.")
    ] = False,
) -> None:
    """Print the memory of each system while it draws one image."""
    names = chosen_systems(systems, tuple(SYSTEMS))
    if here:
        print(json.dumps(asdict(measure(names[0], size, steps, threads))))
        return
    results = [_measure_alone(name, size, steps, threads) for name in names]
    table = results_table(
        _HEADINGS, title=f"Stable Diffusion 1.5, one image of {size} px with guidance, {steps} steps"
    )
    for result in results:
        share = f"{result.together / results[0].together:.0%}"
        sizes = (result.model, result.drawing, result.together)
        numbers = [f"{nbytes / 1e9:.2f}" for nbytes in (*sizes, result.accelerating)]
        table.add_row(result.system, *numbers[:3], share, numbers[3])
    wide_console().print(table)


if __name__ == "__main__":
    typer.run(main)
