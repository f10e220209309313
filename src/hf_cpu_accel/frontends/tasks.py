"""The one table behind the Optimum-style classes `CPUModelFor<Task>`.

Plain data that imports nothing, so that `hf_cpu_accel.__getattr__` can ask "is this one of the task classes?"
and `frontends.optimum` can build the classes, without transformers or optimum being loaded to answer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task: `CPUModelFor<name>` wraps what `transformers.<auto_class>` loads.

    Attributes:
        name: the task in class-name form, for example "SequenceClassification".
        auto_class: name of the transformers auto class that loads the model.
        outputs: what the forward pass returns, for the class's docstring.
        pipeline_models: name of the table in `transformers.models.auto.modeling_auto` by which the task's
            pipeline recognises model classes; None where the pipeline does not look (or there is none).
    """

    name: str
    auto_class: str
    outputs: str
    pipeline_models: str | None = None

    @property
    def class_name(self) -> str:
        return f"CPUModelFor{self.name}"


TASKS: tuple[Task, ...] = (
    Task(
        "FeatureExtraction",
        "AutoModel",
        "`last_hidden_state` [batch, sequence, hidden] (and, where there is a pooler, `pooler_output`)",
    ),
    Task(
        "SequenceClassification",
        "AutoModelForSequenceClassification",
        "`logits` [batch, labels]",
        pipeline_models="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task(
        "TokenClassification",
        "AutoModelForTokenClassification",
        "`logits` [batch, sequence, labels]",
        pipeline_models="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task(
        "QuestionAnswering",
        "AutoModelForQuestionAnswering",
        "`start_logits` and `end_logits` [batch, sequence]",
    ),
    Task("MaskedLM", "AutoModelForMaskedLM", "`logits` [batch, sequence, vocabulary]"),
    Task("MultipleChoice", "AutoModelForMultipleChoice", "`logits` [batch, choices]"),
    Task("NextSentencePrediction", "AutoModelForNextSentencePrediction", "`logits` [batch, 2]"),
)

CLASS_NAMES: tuple[str, ...] = ("CPUModel", *(task.class_name for task in TASKS))
"""The names that `hf_cpu_accel.frontends.optimum` defines."""
