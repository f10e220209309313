"""The Optimum-style classes in folders and on the hub: originals or packed, by the arguments of transformers and of optimum."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch

import hf_cpu_accel
from hf_cpu_accel import CPUAccelConfig, explain
from hf_cpu_accel.frontends import import_hook, optimum, optimum_saving, tasks
from tests.frontends.packed.packed_cases import MODELS, bert

PACKED = "cpu_accel.safetensors"
CASES = ("bert", "llama", "t5", "whisper", "vit")


def class_for(auto_class: Any) -> Any:
    task = next(task for task in tasks.TASKS if task.auto_class == auto_class.__name__)
    return getattr(optimum, task.class_name)


def values(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs)[0]


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], Any]:
    """A folder with a small BERT, an input, and the class that loads it."""
    torch.manual_seed(0)
    model, inputs, auto_class = bert()
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small", inputs, class_for(auto_class)


@pytest.mark.parametrize("name", CASES)
def test_packed_folders(name: str, tmp_path: Path) -> None:
    plain, inputs, auto_class = MODELS[name]()
    model = class_for(auto_class)(plain.eval(), cpu_optimize={"dtype": "int8", "threads": 1})
    expected = values(model, inputs)
    model.save_pretrained(tmp_path / "one", packed=True)
    loaded = type(model).from_pretrained(tmp_path / "one")
    assert explain(loaded).dtype == loaded.cpu_config.dtype == "int8"
    assert torch.equal(values(loaded, inputs), expected)
    loaded.save_pretrained(tmp_path / "two")  # as it was loaded
    assert (tmp_path / "two" / PACKED).is_file()
    assert torch.equal(values(auto_class.from_pretrained(tmp_path / "two"), inputs), expected)
    with pytest.raises(RuntimeError, match="packed"):
        loaded.save_pretrained(tmp_path / "three", packed=False)
    with pytest.raises(RuntimeError, match="packed"):
        loaded.state_dict()


def test_packed_without_the_keywords_of_the_loaders(small: Any, tmp_path: Path) -> None:
    folder, _, cls = small
    model = cls.from_pretrained(folder, cpu_optimize="int8")
    import_hook.uninstall()
    try:
        model.save_pretrained(tmp_path / "packed", packed=True)
        model.save_pretrained(tmp_path / "plain")
    finally:
        import_hook.install()
    assert (tmp_path / "packed" / PACKED).is_file()
    assert torch.equal(
        cls.from_pretrained(tmp_path / "plain", cpu_optimize=False).state_dict()["classifier.weight"],
        cls.from_pretrained(folder, cpu_optimize=False).state_dict()["classifier.weight"],
    )


def test_packed_needs_an_accelerated_model(small: Any, tmp_path: Path) -> None:
    folder, _, cls = small
    with pytest.raises(ValueError, match="not accelerated"):
        cls.from_pretrained(folder, cpu_optimize=False).save_pretrained(tmp_path / "packed", packed=True)


def test_options_of_transformers_are_passed_on(small: Any, tmp_path: Path) -> None:
    folder, _, cls = small
    cls.from_pretrained(folder, cpu_optimize="int8").save_pretrained(
        tmp_path / "shards", max_shard_size="200KB"
    )
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_state_dict_and_restore_give_the_originals(dtype: str, small: Any) -> None:
    folder, inputs, cls = small
    plain = cls.from_pretrained(folder, cpu_optimize=False)
    before, expected = plain.state_dict(), values(plain, inputs)
    model = cls.from_pretrained(folder, cpu_optimize=dtype)
    for _ in range(2):
        state = model.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], before[name]) for name in before)
    assert model.restore() is model
    assert model.cpu_config is None
    assert torch.equal(values(model, inputs), expected)
    assert hf_cpu_accel.accelerate_for_cpu(model, dtype=dtype) is model
    assert model.cpu_config == CPUAccelConfig(dtype=dtype)


class _Hub:
    """What is uploaded goes into `files`; arguments are checked against those of `huggingface_hub.HfApi`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: set[str] = set()
        self.api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
        self.api.create_repo.side_effect = lambda repo_id, **options: mock.Mock(repo_id=repo_id)
        self.api.upload_folder.side_effect = self._upload
        self.made = mock.create_autospec(huggingface_hub.HfApi, return_value=self.api)
        monkeypatch.setattr(optimum_saving, "HfApi", self.made)

    def _upload(self, *, folder_path: Path, **options: Any) -> str:
        self.files = {str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*")}
        return "the commit"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> _Hub:
    return _Hub(monkeypatch)


def test_push_to_hub_as_in_transformers(small: Any, hub: _Hub) -> None:
    folder, _, cls = small
    model = cls.from_pretrained(folder, cpu_optimize="int8")
    given = {"private": True, "token": "hf_x", "commit_message": "Fast", "create_pr": True}
    assert model.push_to_hub("me/fast", **given) == "the commit"
    assert hub.made.call_args.kwargs["token"] == "hf_x"
    hub.api.create_repo.assert_called_once_with("me/fast", private=True, exist_ok=True)
    sent = hub.api.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["commit_message"], sent["create_pr"]) == ("me/fast", "Fast", True)
    assert hub.files == {"config.json", "model.safetensors", "cpu_accel_config.json"}
    model.push_to_hub("me/fast", packed=True, revision="int8")
    hub.api.create_branch.assert_called_once_with("me/fast", branch="int8", exist_ok=True)
    assert hub.files == {"config.json", PACKED, "cpu_accel_config.json"}


def test_push_to_hub_as_in_optimum(small: Any, hub: _Hub, tmp_path: Path) -> None:
    folder, _, cls = small
    model = cls.from_pretrained(folder, cpu_optimize="int8")
    model.save_pretrained(tmp_path / "saved", packed=True)
    model.push_to_hub(tmp_path / "saved", "me/one", private=False)
    assert hub.api.create_repo.call_args.args == ("me/one",)
    assert PACKED in hub.files
    assert model.save_pretrained(tmp_path / "two", push_to_hub=True, repository_id="me/two") == "the commit"
    assert hub.api.create_repo.call_args.args == ("me/two",)
    assert "model.safetensors" in hub.files
    with pytest.raises(ValueError, match=r"packed=True is not supported with the saved folder"):
        model.push_to_hub(tmp_path / "saved", "me/one", packed=True)
    with pytest.raises(ValueError, match=r"nowhere.*expected a folder"):
        model.push_to_hub(tmp_path / "nowhere", "me/one")


def test_preprocessors_are_written_beside(small: Any, tmp_path: Path) -> None:
    folder, _, cls = small
    plain = cls.from_pretrained(folder, cpu_optimize=False).model
    tokenizer = mock.Mock()
    cls(plain, preprocessors=[tokenizer], cpu_optimize="int8").save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained.assert_called_once_with(tmp_path / "saved")
