"""docs/how-to/other-libraries.md as it is written, with the packages of the libraries that it names, and what their objects answer.

Not in the suite, which lacks these packages: `make test-adapters` runs it.
"""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

import pytest

_CACHE = tempfile.TemporaryDirectory(prefix="hub-")
os.environ["HF_HUB_CACHE"] = _CACHE.name  # read when huggingface_hub is imported
os.environ["LLAMA_INDEX_CACHE_DIR"] = _CACHE.name  # it has one of its own

import torch  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from hf_cpu_accel import explain  # noqa: E402
from tests.acceptance.documents import ROOT, python_script  # noqa: E402
from tests.acceptance.hub import MINILM, WRITER, make_hub  # noqa: E402

TEXTS = ["Patch the inner tube.", "The soup needs salt."]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the code of the page leaves behind."""
    make_hub(Path(_CACHE.name))
    script = tmp_path_factory.mktemp("page") / "ecosystem.py"
    script.write_text(python_script(ROOT / "docs" / "how-to" / "other-libraries.md"), encoding="utf-8")
    return runpy.run_path(str(script))


def of_int8(model: object) -> bool:
    return any(item.dtype == "int8" for item in explain(model).replaced)


def eager_vectors() -> torch.Tensor:
    return torch.tensor(SentenceTransformer(MINILM, device="cpu").encode(TEXTS))


def agree(found: list[list[float]], expected: torch.Tensor) -> bool:
    return bool((torch.cosine_similarity(torch.tensor(found), expected) >= 0.99).all())


def test_langchain(page: dict[str, Any]) -> None:
    assert of_int8(page["embeddings"]._client)
    assert agree(page["vectors"], eager_vectors())


def test_llama_index(page: dict[str, Any]) -> None:
    assert of_int8(page["embedding"]._model)
    assert agree([page["vector"]], eager_vectors()[:1])


def test_smolagents(page: dict[str, Any]) -> None:
    model = page["agent_model"]
    assert of_int8(model.model)
    model.tokenizer.chat_template = "{{ messages[0]['content'] }}"  # which the stand-in lacks
    answer = model.generate(
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], max_new_tokens=4
    )
    assert answer.role == "assistant"


def test_lm_eval(page: dict[str, Any]) -> None:
    assert of_int8(page["language_model"].model)
    requests = [
        Instance("loglikelihood", doc={}, arguments=("the soup needs", word), idx=number)
        for number, word in enumerate((" salt", " a tyre"))
    ]
    eager = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(WRITER),
        tokenizer=AutoTokenizer.from_pretrained(WRITER),
        device="cpu",
    )
    for model in (page["language_model"], eager):
        model.tokenizer.eos_token = "[SEP]"  # which the stand-in lacks
    found = [likelihood for likelihood, _ in page["language_model"].loglikelihood(requests)]
    expected = [likelihood for likelihood, _ in eager.loglikelihood(requests)]
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0.01)
