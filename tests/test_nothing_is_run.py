"""Nothing that is read from a file or a socket is run: no source calls what would, but for those listed here, with reasons.

SECURITY.md has the same list: `python -m tests.test_security_page` writes it there.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCANNED = ("src", "integrations", "examples", "setup.py")

_MODULES = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "_pickle", "shelve", "yaml"}
_BUILTINS = {"__import__", "compile", "eval", "exec"}
_CALLS = {
    "os.popen": "a shell",
    "os.system": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "tempfile.mktemp": "a name that another process may take first",
    "torch.hub.load": "code from a repository",
    "torch.jit.load": "code in a file",
    "pandas.read_pickle": "a pickle",
    "runpy.run_module": "code in a file",
    "runpy.run_path": "code in a file",
    "ctypes.CDLL": "machine code",
    "ctypes.PyDLL": "machine code",
    "ctypes.cdll.LoadLibrary": "machine code",
    "torch._C._aoti.AOTIModelPackageLoader": "machine code",
    "torch.classes.load_library": "machine code",
    "torch.utils.cpp_extension.load": "machine code",
    "torch.ops.load_library": "machine code",
    "aoti_load_package": "machine code",
}
_ARGUMENTS = {"allow_pickle", "shell", "trust_remote_code", "use_unsafe_loader"}

# (file, function, what is found): why it may be there.
ALLOWED = {
    ("src/hf_cpu_accel/compiler/torch_private/aot_inductor.py", "load_package", "machine code"): (
        "the file that the caller of `load_aot` names"
    ),
    ("src/hf_cpu_accel/extension.py", "status", "machine code"): "the kernels of this package",
    (
        "src/hf_cpu_accel/runtime/fork.py",
        "_runtimes",
        "machine code",
    ): "the OpenMP library that this process has already loaded",
    ("src/hf_cpu_accel/serve/instances/messages.py", "", "import pickle"): (
        "objects of the caller between the processes of a pool, over unnamed sockets that only these processes have"
    ),
    ("src/hf_cpu_accel/rewrite/capture/program.py", "function", "exec"): (
        "a generated function that calls the recorded steps in order. Its text contains numbered names, numbers, and names of "
        "arguments, which must be identifiers. None of it comes from a file"
    ),
    ("src/hf_cpu_accel/runtime/memory.py", "_glibc", "machine code"): "the C library of this process",
}


def findings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(function, what is found there)."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        yield from ((function, found) for found in _found(node))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, "")


def _found(node: ast.AST) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    yield from (f"import {name}" for name in names if name.split(".")[0] in _MODULES)
    if not isinstance(node, ast.Call):
        return
    called, given = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
    if called in _BUILTINS or called in {f"builtins.{name}" for name in _BUILTINS}:
        yield called
    if called in _CALLS:
        yield _CALLS[called]
    if called == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    yield from (f"{name}=" for name in _ARGUMENTS & given.keys() if _may_be_true(given[name]))


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _may_be_true(node: ast.expr) -> bool:
    """But what the user has passed to us under the same name is the user's word."""
    return not _is(node, False) and not (isinstance(node, ast.Name) and node.id in _ARGUMENTS)


def test_only_the_reasoned_exceptions() -> None:
    files = [
        file for name in SCANNED for file in (ROOT / name, *(ROOT / name).rglob("*.py")) if file.is_file()
    ]
    assert len(files) > 250
    found = Counter(
        (str(file.relative_to(ROOT)), function, what)
        for file in files
        for function, what in findings(ast.parse(file.read_text(encoding="utf-8")))
    )
    assert found == Counter(ALLOWED.keys())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("import a.b, dill.detect", "import dill.detect"),
        ("eval(x)", "eval"),
        ("builtins.exec(x)", "builtins.exec"),
        ("compile(x, '', 'eval')", "compile"),
        ("torch.load(f)", "torch.load without weights_only=True"),
        ("torch.load(f, weights_only=False)", "torch.load without weights_only=True"),
        ("torch.load(f, weights_only=flag)", "torch.load without weights_only=True"),
        ("subprocess.run(x, shell=True)", "shell="),
        ("os.system(x)", "a shell"),
        ("np.load(f, allow_pickle=True)", "allow_pickle="),
        ("A.from_pretrained(x, trust_remote_code=True)", "trust_remote_code="),
        ("ctypes.CDLL(f)", "machine code"),
    ],
)
def test_the_scan_finds_it(text: str, expected: str) -> None:
    source = f"def outer():\n    def inner():\n        {text}\n"
    assert list(findings(ast.parse(source))) == [("inner", expected)]


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.compile(model)",
        "re.compile(x)",
        "torch.load(f, weights_only=True)",
        "subprocess.run(x, shell=False)",
        "f(trust_remote_code=trust_remote_code)",
        "def __reduce__(self): return f, ()",
    ],
)
def test_the_scan_lets_pass(text: str) -> None:
    assert list(findings(ast.parse(text))) == []
