"""Every task of `transformers.pipeline` with a model of the Optimum-style class for it: the answers are those of transformers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.pipelines import SUPPORTED_TASKS

from hf_cpu_accel import explain
from hf_cpu_accel.frontends import optimum, tasks
from tests.architectures.inputs import Maker
from tests.architectures.small import small_configs
from tests.frontends.optimum_table import PAGE, page
from tests.tasks.all import CASES, task_of
from tests.tasks.test_pipelines import check, outcome

# Of which model types the classes are tried that no pipeline takes, or whose pipeline has a case of another class.
OTHERS = {
    "AudioFrameClassification": "wav2vec2",
    "AudioXVector": "wav2vec2",
    "ImageToImage": "swin2sr",
    "InstanceSegmentation": "maskformer",
    "UniversalSegmentation": "maskformer",
    "VisualQuestionAnswering": "vilt",
}
# Which class loads the model of a case, where several serve the task.
CLASSES = {
    "automatic-speech-recognition (CTC)": "CTC",
    "automatic-speech-recognition": "SpeechSeq2Seq",
    "text-to-audio": "TextToWaveform",
    "text-to-audio (spectrogram)": "TextToSpectrogram",
    "image-segmentation": "SemanticSegmentation",
}


def class_name(case: str) -> str:
    serving = [task for task in tasks.TASKS if task_of(case) in task.pipelines]
    return next(task.class_name for task in serving if task.name == CLASSES.get(case, task.name))


def test_every_pipeline_has_a_class():
    assert {name for task in tasks.TASKS for name in task.pipelines} == set(SUPPORTED_TASKS)


def test_the_page_has_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs-tasks`"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_in_the_pipeline_of_its_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    plain = case.build()
    expected = [outcome(plain, call) for call in case.calls]
    plain.model.save_pretrained(tmp_path)

    cls = getattr(optimum, class_name(name))
    settings = {"dtype": "float32", "padding": "compute"}  # some pipelines give what stands at the padding
    model = cls.from_pretrained(tmp_path, export=True, cpu_optimize=settings)
    assert type(model) is cls
    assert explain(model).replaced
    assert model.can_generate() == plain.model.can_generate()

    pipeline, errors = transformers.pipeline, []

    def with_ours(*args: Any, **options: Any) -> Any:
        return pipeline(*args, **{**options, "model": model})

    monkeypatch.setattr(transformers, "pipeline", with_ours)
    monkeypatch.setattr(transformers.pipelines.base.logger, "error", errors.append)
    pipe = case.build()
    assert errors == []  # "the model ... is not supported for ..."
    assert pipe.model is model
    for call, answer in zip(case.calls, expected, strict=True):
        check(outcome(pipe, call), answer)


def taken_by(model: Any) -> dict[str, Any]:
    """The first of the guesses that the model takes."""
    for batch in Maker(model).batches():
        with contextlib.suppress(ValueError):
            model(**batch)
            return batch
    raise AssertionError(f"no input for {type(model).__name__}")


@pytest.mark.parametrize("name", OTHERS)
@torch.inference_mode()
def test_outside_of_pipelines(name: str) -> None:
    task = next(task for task in tasks.TASKS if task.name == name)
    _, config = next(small_configs(OTHERS[name]))
    with torch.inference_mode(False):
        plain = getattr(transformers, task.auto_class).from_config(config).eval()
    inputs = {"input_values": torch.randn(1, 16000)} if name.startswith("Audio") else taken_by(plain)
    expected = plain(**inputs)
    model = getattr(optimum, task.class_name)(plain, cpu_optimize={"dtype": "float32", "padding": "compute"})
    assert explain(model).replaced
    answer = model(**inputs)
    assert list(answer) == list(expected)
    for output in expected:
        if isinstance(expected[output], torch.Tensor):
            torch.testing.assert_close(answer[output], expected[output], rtol=1e-3, atol=1e-3)


def test_every_class_is_tried_somewhere() -> None:
    of_bert = {"QuestionAnswering", "MultipleChoice", "NextSentencePrediction"}  # in test_optimum.py
    generating = {"Seq2SeqLM"}  # in test_optimum_generation.py
    tried = {class_name(case) for case in CASES}
    missing = {task.name for task in tasks.TASKS if task.class_name not in tried}
    assert missing == of_bert | generating | set(OTHERS)
