"""The keyword `cpu_optimize=` on every class that loads: signatures, and that it can be taken back."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)
from transformers.pipelines import Pipeline

from hf_cpu_accel import api
from hf_cpu_accel.frontends import import_hook

pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AutoModel, "from_pretrained"),
        (BertModel, "from_pretrained"),
        (transformers, "pipeline"),
        (Pipeline, "__init__"),
    ],
)
def test_signature_shows_the_keyword_and_the_documentation_stays(owner, name):
    function = getattr(owner, name)
    parameters = inspect.signature(function).parameters
    assert parameters["cpu_optimize"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(parameters.values())[-1].kind is inspect.Parameter.VAR_KEYWORD
    assert function.__name__ == name
    if name != "__init__":
        assert len(function.__doc__) > 500


def auto_classes():
    found = [
        cls
        for name, cls in vars(transformers.models.auto.modeling_auto).items()
        if name.startswith("AutoModel")
    ]
    assert len(found) > 20
    return found


def test_every_auto_class_has_the_keyword():
    for cls in auto_classes():
        assert "cpu_optimize" in inspect.signature(cls.from_pretrained).parameters, cls


def test_uninstall_restores_every_original_object(folder, calls):
    import_hook.uninstall()
    owners = [transformers.PreTrainedModel, *auto_classes()]
    plain = [vars(owner).get("from_pretrained") for owner in owners]
    plain += [transformers.pipelines.pipeline, vars(Pipeline)["__init__"]]
    for function in plain:
        assert (
            function is None
            or "cpu_optimize" not in inspect.signature(getattr(function, "__func__", function)).parameters
        )
    import_hook.install()
    import_hook.uninstall()
    again = [vars(owner).get("from_pretrained") for owner in owners]
    again += [transformers.pipelines.pipeline, vars(Pipeline)["__init__"]]
    assert all(one is two for one, two in zip(plain, again, strict=True))
    assert transformers.pipeline is transformers.pipelines.pipeline
    with pytest.raises(TypeError, match="cpu_optimize"):
        BertModel.from_pretrained(folder, cpu_optimize=True)
    assert calls == []


def test_kept_reference_to_the_wrapper_is_plain_after_uninstall(folder, calls):
    kept = BertModel.from_pretrained
    import_hook.uninstall()
    assert type(kept(folder)) is BertModel
    with pytest.raises(TypeError, match="cpu_optimize"):
        kept(folder, cpu_optimize=True)
    assert calls == []


def test_real_acceleration_through_the_keyword(folder):
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    batch = tokenizer(["a good film", "bad"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = BertForSequenceClassification.from_pretrained(folder)(**batch).logits
        model = AutoModelForSequenceClassification.from_pretrained(folder, cpu_optimize="float32")
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert any(item.reason is None for item in api.explain(model).items)
