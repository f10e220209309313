import subprocess
import sys

import pytest
from torch import nn

from hf_cpu_accel.hosts.find import find


def test_any_module_is_its_own_root():
    model = nn.Linear(3, 3)
    (root,) = find(model)
    assert root.module is model
    assert root.host == "torch"
    assert root.deciding == (model,)


@pytest.mark.parametrize(
    ("target", "described"),
    [
        (None, "a NoneType"),
        ("bert-base-uncased", "a str"),
        (nn.Linear, "the class Linear, not an instance"),
        ([], "a list"),
    ],
)
def test_anything_else_is_refused_with_what_is_accepted(target, described):
    with pytest.raises(
        TypeError, match=f"target is {described}.*accepted: a transformers Pipeline.*torch.nn.Module"
    ):
        find(target)


def test_host_libraries_are_not_imported_for_a_plain_module():
    code = (
        "import sys, torch, hf_cpu_accel; m = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval(); "
        "hf_cpu_accel.accelerate_for_cpu(m); assert len(hf_cpu_accel.explain(m).replaced) == 1; "
        "print([n for n in ('transformers', 'sentence_transformers') if n in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
