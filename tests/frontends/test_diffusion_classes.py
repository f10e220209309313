"""`CPUDiffusionPipeline` and the classes for its tasks: diffusers' own pipelines, loaded and accelerated."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

import hf_cpu_accel
from hf_cpu_accel import CPUAccelConfig, CPUDiffusionPipeline, explain, restore
from hf_cpu_accel.frontends import diffusion_pipelines, import_hook, tasks
from tests.hosts.diffusion_pipelines import stable_diffusion

PLAIN = {"safety_checker": None}
QUICKLY = CPUAccelConfig(dtype="int8", verify=False)
PACKED = Path("unet", "diffusion_pytorch_model.safetensors")
ARGUMENTS = {"prompt": "a small house", "height": 16, "width": 16, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, np.ndarray]:
    """A folder, and the picture that the plain pipeline makes."""
    pipe, call = stable_diffusion()
    folder = tmp_path_factory.mktemp("pipeline")
    pipe.save_pretrained(folder)
    return str(folder), call()


def picture(pipe: Any) -> np.ndarray:
    import torch

    pipe.set_progress_bar_config(disable=True)
    return pipe(**ARGUMENTS, output_type="np", generator=torch.Generator().manual_seed(0)).images


def test_the_table_is_the_classes() -> None:
    assert tuple(diffusion_pipelines.__all__) == tuple(tasks.DIFFUSION)
    for name, loader in tasks.DIFFUSION.items():
        cls = getattr(hf_cpu_accel, name)
        assert issubclass(cls, CPUDiffusionPipeline)
        assert (cls.__name__, cls.__module__) == (name, "hf_cpu_accel.frontends.diffusion_pipelines")
        assert cls.auto_pipeline_class is getattr(diffusers, loader)
        assert loader in cls.__doc__
        assert name in dir(hf_cpu_accel)
        with pytest.raises(TypeError, match=rf"{name}\.from_pretrained"):
            cls()


def test_loaded_and_accelerated(saved: Any) -> None:
    folder, expected = saved
    pipe = CPUDiffusionPipeline.from_pretrained(
        folder, export=True, device="CPU", cpu_optimize="float32", **PLAIN
    )
    assert type(pipe) is diffusers.StableDiffusionPipeline
    assert explain(pipe).dtype == "float32"
    np.testing.assert_allclose(picture(pipe), expected, atol=2e-4)
    assert pipe.to("cpu") is pipe
    assert np.array_equal(picture(restore(pipe)), expected)


def test_other_tasks_of_the_same_models(saved: Any) -> None:
    folder, _ = saved
    pipe = hf_cpu_accel.CPUPipelineForImage2Image.from_pretrained(folder, cpu_optimize=QUICKLY, **PLAIN)
    assert type(pipe) is diffusers.StableDiffusionImg2ImgPipeline
    assert explain(pipe).dtype == "int8"
    other = hf_cpu_accel.CPUPipelineForInpainting.from_pipe(pipe, cpu_optimize=QUICKLY)
    assert type(other) is diffusers.StableDiffusionInpaintPipeline
    assert other.unet is pipe.unet


def test_plain_on_request(saved: Any, tmp_path: Path) -> None:
    folder, expected = saved
    pipe = CPUDiffusionPipeline.from_pretrained(folder, cpu_optimize=False, **PLAIN)
    assert not explain(pipe).replaced
    assert np.array_equal(picture(pipe), expected)
    with pytest.raises(ValueError, match="no model of this StableDiffusionPipeline is accelerated"):
        pipe.save_pretrained(tmp_path, packed=True)


def test_packed_folders(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved
    pipe = CPUDiffusionPipeline.from_pretrained(folder, cpu_optimize=QUICKLY, **PLAIN)
    expected = picture(pipe)
    pipe.save_pretrained(tmp_path, packed=True)
    loaded = CPUDiffusionPipeline.from_pretrained(tmp_path, **PLAIN)
    assert explain(loaded).dtype == "int8"
    assert np.array_equal(picture(loaded), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_optimize": "int9"}, "int9"),
        ({"device_map": "cuda"}, "device_map='cuda'"),
        ({"device": "GPU"}, "device='GPU'"),
    ],
)
def test_bad_arguments_raise_before_anything_is_loaded(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUDiffusionPipeline.from_pretrained("no-such-folder", **options)


def test_push_to_hub_sends_the_originals(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved
    sent: dict[str, set[str]] = {}

    def upload(*, repo_id: str, folder_path: str, **options: Any) -> str:
        root = Path(folder_path)
        sent[repo_id] = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        return "the commit"

    module = "diffusers.utils.hub_utils"
    monkeypatch.setattr(f"{module}.create_repo", lambda name, **options: type("Url", (), {"repo_id": name}))
    monkeypatch.setattr(f"{module}.upload_folder", upload)
    monkeypatch.setattr(f"{module}.load_or_create_model_card", lambda *args, **options: _Card())
    monkeypatch.setattr(f"{module}.populate_model_card", lambda card, **options: card)
    import_hook.uninstall()  # the classes need no keyword
    try:
        pipe = CPUDiffusionPipeline.from_pretrained(folder, cpu_optimize=QUICKLY, **PLAIN)
    finally:
        import_hook.install()
    assert pipe.push_to_hub("me/fast") == "the commit"
    assert {"model_index.json", str(PACKED)} <= sent["me/fast"]


class _Card:
    def save(self, path: str) -> None:
        Path(path).write_text("card")


def test_without_diffusers_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install hf_cpu_accel\[diffusers\]"):
        runpy.run_path(diffusion_pipelines.__file__)
