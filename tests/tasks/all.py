"""A case for every pipeline task of transformers; some tasks have several, told apart by what stands in parentheses."""

from tests.tasks import audio, images, multimodal, text

CASES = {**text.CASES, **images.CASES, **audio.CASES, **multimodal.CASES}


def task_of(name: str) -> str:
    return name.split(" (")[0]
