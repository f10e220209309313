"""`hf-cpu-accel chat`: a conversation through standard input, and how it refuses."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from hf_cpu_accel.cli import chat_session, random_models
from hf_cpu_accel.cli.main import app

_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def chat(*arguments: str, said: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments, "--threads", "1"], input=said, env={"COLUMNS": "200"})


def save_model(folder: Path, positions: int = 128) -> None:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def save_tokenizer(folder: Path, template: str | None = None) -> None:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "talker"
    save_model(folder)
    save_tokenizer(folder, _TEMPLATE)
    return folder


def test_each_answer_is_written_with_its_speed(model: Path) -> None:
    result = chat(str(model), "--dtype", "float32", "--new", "5", said="hello\n\n/reset\nagain\n/exit\nno\n")
    assert result.exit_code == 0, result.output
    assert "talker, float32" in result.output
    assert result.output.count("5 tokens, first token after") == 2
    assert "chat template" not in result.output


def test_the_end_of_input_quits(model: Path) -> None:
    assert chat(str(model), "--new", "2").exit_code == 0


def session(folder: Path, new: int = 4) -> chat_session.ChatSession:
    return chat_session.open_session(str(folder), None, dtype="float32", new=new, threads=1)


def test_a_template_gets_earlier_messages_until_a_reset(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = session(model)
    seen: list[str] = []
    decode, generate = talk._tokenizer.decode, talk._model.generate

    def watched(**arguments: object) -> torch.Tensor:
        seen.append(decode(arguments["input_ids"][0]))
        return generate(**arguments)

    monkeypatch.setattr(talk._model, "generate", watched)
    pieces: list[str] = []
    answer = talk.answer("one", pieces.append)
    assert "".join(pieces) == answer.text
    assert (answer.tokens, answer.stopped) == (4, False)
    assert answer.first is not None
    assert answer.rate is not None
    talk.answer("two", pieces.append)
    talk.reset()
    talk.answer("three", pieces.append)
    assert seen == ["u:one;a:", f"u:one;a:{answer.text};u:two;a:", "u:three;a:"]


def test_the_oldest_exchanges_are_dropped_at_the_limit(tmp_path: Path) -> None:
    save_model(tmp_path, positions=40)
    save_tokenizer(tmp_path, _TEMPLATE)
    talk = session(tmp_path, new=8)
    for number in range(6):
        talk.answer(f"word {number}", lambda text: None)
        assert talk._messages[0]["role"] == "user"
    assert talk._messages[-2]["content"] == "word 5"
    assert len(talk._messages) < 8


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = chat_session._Streamer.put

    def impatient(self: chat_session._Streamer, value: torch.Tensor) -> None:
        put(self, value)
        if len(self.clock.times) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_session._Streamer, "put", impatient)
    result = chat(str(model), "--new", "9", said="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("stopped, 3 tokens") == 2
    talk = session(model)
    stopped = talk.answer("one", lambda text: None)
    assert stopped.stopped
    assert talk._messages[-1] == {"role": "assistant", "content": stopped.text}


def test_without_a_template_each_text_is_continued_separately(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    result = chat(str(tmp_path), "--new", "3", said="def f(\n")
    assert "no chat template" in result.output
    assert "3 tokens" in result.output


def test_random_weights_need_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("gpt2", {"vocab_size": 1000, "n_embd": 32, "n_layer": 1, "n_head": 2})
    monkeypatch.setitem(random_models._ARCHITECTURES, "gpt2", small)
    result = chat("--random-config", "gpt2", "--new", "6", said="Grüße\n")
    assert result.exit_code == 0, result.output
    assert "gpt2 (random weights)" in result.output
    assert "6 tokens" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--random-config"),
        (["--random-config", "gpt-huge"], "SmolLM2-135M"),
        (["--random-config", "bert-tiny", "--dtype", "float31"], "float32"),
        (["--random-config", "distilbert-base-uncased"], "does not generate text"),
    ],
)
def test_bad_arguments_name_what_is_accepted(arguments: list[str], message: str) -> None:
    result = chat(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_model_without_tokenizer_names_the_fix(tmp_path: Path) -> None:
    save_model(tmp_path)
    result = chat(str(tmp_path))
    assert result.exit_code == 2
    assert "save_pretrained" in result.output


def test_a_missing_model_names_the_offline_options(tmp_path: Path) -> None:
    result = chat(str(tmp_path / "absent"))
    assert result.exit_code == 1
    assert "--random-config" in result.output
