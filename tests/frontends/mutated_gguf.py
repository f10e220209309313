"""GGUF files that something has happened to: each is refused in words, or loaded as transformers' own loader reads it.

`python -m tests.frontends.mutated_gguf --cases 10000` (`make fuzz-files`); `make test` tries a few dozen. A case is a number.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_cpu_accel.checkpoints.stored import pack_stored, stored_weight
from hf_cpu_accel.frontends.gguf import load_in_blocks
from hf_cpu_accel.packing.linear import unpack_linear
from tests.frontends.test_gguf import write_file

_SECONDS = 20


def header_end(content: bytes) -> int:
    """Where the tensors begin, or a little before: names, numbers and places are above."""
    return content.rindex(b"output_norm.weight") + 64


def flip_header(content: bytes, draw: random.Random) -> bytes:
    return _flip(content, 0, header_end(content), draw)


def flip_payload(content: bytes, draw: random.Random) -> bytes:
    return _flip(content, header_end(content), len(content), draw)


def edit_number(content: bytes, draw: random.Random) -> bytes:
    """A word of the header is another number."""
    place = draw.randrange(0, header_end(content) - 8)
    number = draw.choice((0, 1, 2, 7, 8, 64, 1 << 31, (1 << 32) - 1))
    return content[:place] + number.to_bytes(4, "little") + content[place + 4 :]


def edit_name(content: bytes, draw: random.Random) -> bytes:
    """A tensor or a setting has another name."""
    words = (
        b"attn_q",
        b"attn_k",
        b"ffn_up",
        b"ffn_norm",
        b"token_embd",
        b"head_count",
        b"embedding_length",
        b"llama",
    )
    word = draw.choice([word for word in words if word in content])
    others = [other for other in (*words, b"attn_x", b"ffn_xx") if len(other) == len(word) and other != word]
    other = draw.choice(others) if others else word[::-1]
    places = [at for at in range(header_end(content)) if content.startswith(word, at)]
    place = draw.choice(places)
    return content[:place] + other + content[place + len(word) :]


def truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice((draw.randrange(len(content)), draw.randrange(2000), len(content) - 1))]


def append(content: bytes, draw: random.Random) -> bytes:
    return content + draw.randbytes(draw.choice((1, 64, 4096)))


def zero_page(content: bytes, draw: random.Random) -> bytes:
    """A page that never reached the disk."""
    start = draw.randrange(0, len(content), 4096)
    return content[:start] + bytes(min(4096, len(content) - start)) + content[start + 4096 :]


def _flip(content: bytes, start: int, end: int, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        bit = draw.randrange(start * 8, end * 8)
        changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_header,
    flip_payload,
    edit_number,
    edit_name,
    truncate,
    append,
    zero_page,
)


class Hung(BaseException):
    """It took more CPU than it may."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*unused: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU: a busy machine is slow, too
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def numbers(model: Any) -> dict[str, Tensor]:
    """All weights, by the names of a plain model; of linears in blocks what would be packed."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        weight = stored_weight(module)
        if weight is not None and weight.refusal is None:
            found[f"{path}.weight"] = unpack_linear(pack_stored([weight]))
        elif hasattr(module, "ggml_type"):
            from transformers.integrations.gguf.dequant import dequantize

            found[f"{path}.weight"] = dequantize(module.weight.detach(), module.ggml_type)
    return found


def check(folder: Path, name: str, model: Any) -> str:
    """What became of a file that was loaded."""
    theirs = numbers(AutoModelForCausalLM.from_pretrained(folder, gguf_file=name))
    for path, values in numbers(model).items():
        expected = theirs[path].float()
        near = torch.allclose(
            values.float().view(expected.shape), expected, rtol=1e-5, atol=1e-5, equal_nan=True
        )
        if not near and torch.isfinite(expected).all():
            return f"WRONG {path}"
    return "as transformers reads it"


def run(cases: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """What became of the cases `seed`, `seed + 1`, ..., and those of them that went wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        path = write_file(folder, "llama")
        content = path.read_bytes()
        for case in range(seed, seed + cases):
            draw = random.Random(case)
            mutation = draw.choice(MUTATIONS)
            path.unlink()  # mapped by what was read before
            path.write_bytes(mutation(content, draw))
            outcome = _outcome(folder, path.name)
            counts[f"{mutation.__name__}: {outcome}"] += 1
            if outcome.split()[0] not in ("refused", "as"):
                wrong.append(f"case {case}, {mutation.__name__}: {outcome}")
    return counts, wrong


def _outcome(folder: Path, name: str) -> str:
    try:
        with limited(_SECONDS):
            model = load_in_blocks(AutoModelForCausalLM.from_pretrained, folder, gguf_file=name)
        return check(folder, name, model)
    except (ValueError, OSError):
        return "refused"
    except Hung:
        return "HUNG"
    except Exception as error:
        return f"RAISED {type(error).__name__}: {str(error)[:100]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seen, failures = run(options.cases, options.seed)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(seen.items())))
    print("\n".join(failures))
    raise SystemExit(bool(failures))
