"""`optimum-cli export cpu-accel`, the package in integrations/optimum: installed, found by optimum, and what it writes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from optimum.commands import optimum_cli
from transformers import AutoTokenizer

from hf_cpu_accel import CPUModelForSequenceClassification, explain
from hf_cpu_accel.config import DTYPES, INT4_GROUPS
from tests.acceptance.tokenizers import wordpiece
from tests.children import run_child
from tests.frontends.packed.packed_cases import bert

SOURCE = Path(__file__).parents[2] / "integrations" / "optimum"
FILES = {"optimum/commands/export/cpu_accel.py", "optimum/commands/register/register_cpu_accel.py"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    bert()[0].save_pretrained(tmp_path / "checkpoint")
    wordpiece().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_the_installed_command_packs(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "source")  # what building leaves behind stays there
    site = tmp_path / "site"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", "-q", *options]
    run_child([*install, "--target", str(site), str(tmp_path / "source")], cpu_seconds=60, check=True)
    installed = {str(file.relative_to(site)) for file in site.rglob("*.py")}
    assert installed == FILES  # and no __init__.py, which would hide optimum's own

    packed = tmp_path / "packed"
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    export = ["-m", "optimum.commands.optimum_cli", "export", "cpu-accel", "--model", str(checkpoint)]
    done = run_child(
        [sys.executable, *export, str(packed), "--dtype", "int8", "--threads", "1"],
        cpu_seconds=60,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert "BertForSequenceClassification, int8" in done.stdout
    loaded = CPUModelForSequenceClassification.from_pretrained(packed)
    model = CPUModelForSequenceClassification.from_pretrained(checkpoint, cpu_optimize="int8")
    assert explain(loaded).dtype == "int8"
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert AutoTokenizer.from_pretrained(packed).vocab_size == wordpiece().vocab_size


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command in this process: (exit code, all that it prints)."""
    monkeypatch.syspath_prepend(str(SOURCE / "src"))

    def called(*arguments: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "export", "cpu-accel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            optimum_cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    return called


def test_help_names_what_is_accepted(run) -> None:
    code, printed = run("--help")
    assert code == 0
    assert all(str(accepted) in printed for accepted in (*DTYPES, *INT4_GROUPS))


def test_wrong_arguments_are_rejected(run, checkpoint: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    for arguments, code, says in (
        (("--model", checkpoint, packed, "--dtype", "int3"), 2, "int3"),
        (("--model", checkpoint, packed, "--int4-group", 7), 2, "int4_group=7"),
        (("--model", checkpoint, checkpoint), 2, "expected another folder"),
        (("--model", tmp_path / "nowhere", packed), 1, "Cannot load"),
        ((packed,), 2, "--model"),
    ):
        assert run(*arguments)[0] == code
        assert says in run(*arguments)[1]
    assert not packed.exists()
