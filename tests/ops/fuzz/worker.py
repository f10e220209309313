"""Runs cases in this process: `python -m tests.ops.fuzz.worker --seed 0 --cases 100`. One that crashes takes only this process
along, and the number that was printed last tells which it was."""

from __future__ import annotations

import argparse
import random
import sys

import torch

from tests.ops.fuzz import attention, convolution, decoder_layers, encoder_layer, ffn, linear, norms, sparse
from tests.ops.fuzz.call import Call
from tests.ops.fuzz.judge import judge_good, judge_spoiled
from tests.ops.fuzz.spoil import spoiled
from tests.ops.sparse import test_fuzz

FAMILIES = {
    module.__name__.rpartition(".")[2]: module.FAMILY
    for module in (linear, attention, encoder_layer, decoder_layers, ffn, norms, convolution, sparse)
}
FUNCTIONS = "sparse_functions"  # the Python functions of ops/sparse.py, by sparse/test_fuzz.py
SPOILT = 0.6  # of all cases


def call_of(number: int, families: list[str]) -> tuple[Call, bool]:
    """Case `number`: the call, and whether it is a good one."""
    rng = random.Random(number)
    torch.manual_seed(number)
    torch.set_num_threads(rng.choice((1, 2)))
    call = rng.choice(FAMILIES[families[number % len(families)]])(rng)
    if rng.random() < SPOILT:
        return spoiled(call, rng), False
    return call, True


def run_case(number: int, families: list[str]) -> None:
    """
    Raises:
        AssertionError: the op did what it may not do.
    """
    if families[number % len(families)] == FUNCTIONS:
        return test_fuzz.fuzz(1, number)
    call, good = call_of(number, families)
    try:
        judge_good(call) if good else judge_spoiled(call)
    except Exception as error:
        what = error if isinstance(error, AssertionError) else repr(error)
        raise AssertionError(f"case {number}, {'good' if good else 'bad'}: {what}\n  {call}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", choices=[*FAMILIES, FUNCTIONS], action="append")
    options = parser.parse_args()
    failed = 0
    for number in range(options.seed, options.seed + options.cases):
        print(number, flush=True)
        try:
            run_case(number, options.op or [*FAMILIES, FUNCTIONS])
        except AssertionError as error:
            failed += 1
            print(error, file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
