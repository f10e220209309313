"""Where a Space listens, and what its pages are made of; the pages themselves are in tests/spaces/browser.py."""

import pytest

from hf_cpu_accel.serve.space import address, table


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("127.0.0.1", 7860)),
        ({"SPACE_ID": "someone/space"}, ("0.0.0.0", 7860)),
        ({"PORT": "8080"}, ("127.0.0.1", 8080)),
        ({"PORT": "8080", "GRADIO_SERVER_PORT": "65535"}, ("127.0.0.1", 65535)),
        ({"GRADIO_SERVER_NAME": "::1", "SPACE_ID": "someone/space"}, ("::1", 7860)),
        ({"PORT": "", "GRADIO_SERVER_NAME": ""}, ("127.0.0.1", 7860)),
    ],
)
def test_address(variables, expected):
    assert address(variables) == expected


@pytest.mark.parametrize("name", ["PORT", "GRADIO_SERVER_PORT"])
@pytest.mark.parametrize("value", ["0", "65536", "-1", "http", "80.5", "²"])
def test_wrong_ports_are_rejected(name, value):
    with pytest.raises(ValueError, match=f"{name}='{value}': accepted are whole numbers from 1 to 65535"):
        address({name: value})


def test_cells_are_escaped():
    html = table(("a", "b"), [["<script>", "1 & 2"], ["LayerNorm", ""]])
    assert "<th>a</th><th>b</th>" in html
    assert "<td>&lt;script&gt;</td><td>1 &amp; 2</td>" in html
    assert "<td>Layer<wbr>Norm</td><td></td>" in html
