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
        TypeError, match=f"target is {described}.*expected a transformers Pipeline.*torch.nn.Module"
    ):
        find(target)
