"""The object files that the kernels are linked from: none holds an instruction of a higher tier or shares a function with another.

A CPU of a lower tier would stop at such an instruction; and of functions that several objects define alike (templates, inline
ones), the linker keeps one, whichever tier it was compiled for. The objects are those of the last build, in build/kernels.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CSRC = REPOSITORY / "src" / "hf_cpu_accel" / "csrc"
OBJECTS = sorted((REPOSITORY / "build" / "kernels").glob("*.o"))

# What a tier has and those below it have not: encodings that objdump names by their first byte, then names.
AVX = r"\bvex\b"
AVX512 = r"\bevex\b"
VNNI = r"\bvpdp(?:busd|wssd)s?\b"
BF16 = r"\bvdpbf16ps\b|\bvcvtne2?ps2bf16\w*\b"
TILES = r"\b(?:tile(?:load|stored|zero|release)\w*|tdp\w+|ldtilecfg|sttilecfg)\b"
# Of AVX-512's other extensions: no tier has them.
NO_TIERS = r"\bv(?:perm(?:b|i2b|t2b)|pshld\w*|pcompress[bw]|pmadd52\w*|\w+[ps]h|p2intersect\w*|gf2p8\w*)\b"
FORBIDDEN = {
    "generic": (AVX, AVX512, VNNI, BF16, TILES),
    "avx2": (AVX512, VNNI, BF16, TILES),
    "avx2_vnni": (AVX512, BF16, TILES),
    "avx512": (VNNI, BF16, TILES),
    "avx512_vnni": (BF16, TILES),
    "avx512_bf16": (TILES,),
    "amx": (),
    "amx_emulated": (BF16, TILES),
}

needs_binutils = pytest.mark.skipif(
    not shutil.which("objdump") or not shutil.which("nm"), reason="no binutils"
)
needs_objects = pytest.mark.skipif(
    not any(path.name == "tier_avx2.o" for path in OBJECTS), reason="the kernels were not built here for x86"
)


def tier_of(path: Path) -> str:
    """Code that every CPU runs is held to what the lowest tier may have."""
    return path.stem.removeprefix("tier_") if path.stem.startswith("tier_") else "generic"


def instructions(path: Path) -> str:
    """Encoding and name of each of its instructions, one a line."""
    command = ["objdump", "-d", "--insn-width=16", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    encoding = {"62": "evex", "c4": "vex", "c5": "vex"}
    lines = re.findall(r"^ +[0-9a-f]+:\t([0-9a-f]{2}) [0-9a-f ]*\t(?:\{\w+\} )?(\S+)", text, re.MULTILINE)
    return "\n".join(f"{encoding.get(first, '')} {name}" for first, name in lines)


def foreign(path: Path, tier: str) -> set[str]:
    """Instructions of `path` that a CPU of `tier` need not have."""
    found = re.compile("|".join((*FORBIDDEN[tier], NO_TIERS)))
    return {line for line in set(instructions(path).splitlines()) if found.search(line)}


def shared(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Symbols that objects of several tiers define, of which the linker keeps one, and these tiers."""
    holders = defaultdict(set)
    for path in paths:
        text = subprocess.run(
            ["nm", "--defined-only", str(path)], capture_output=True, text=True, check=True
        ).stdout
        for symbol in re.findall(r"^\S+ [VWuvw] (\S+)$", text, re.MULTILINE):
            # Objects that are held to no tier share as they like, with each other.
            holders[symbol].add(path.stem if path.stem.startswith("tier_") else "others")
    return {symbol: tiers for symbol, tiers in holders.items() if len(tiers) > 1}


@needs_binutils
@needs_objects
@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.stem)
def test_no_instruction_of_a_higher_tier(path: Path) -> None:
    assert foreign(path, tier_of(path)) == set()


@needs_binutils
@needs_objects
def test_each_tier_has_what_it_is_for() -> None:
    """Otherwise the test above would pass over names that objdump spells in another way."""
    by_tier = {tier_of(path): instructions(path) for path in OBJECTS if path.stem.startswith("tier_")}
    for tier, what in (
        ("avx2", AVX), ("avx2_vnni", VNNI), ("avx512", AVX512), ("avx512_vnni", VNNI), ("avx512_bf16", BF16), ("amx", TILES)
    ):  # fmt: skip
        assert re.search(what, by_tier[tier]), tier


@needs_binutils
@needs_objects
def test_no_function_is_shared_by_tiers() -> None:
    assert shared(OBJECTS) == {}


def compile_for(tier: str, flags: list[str], source: str, folder: Path) -> Path:
    target = folder / f"tier_{tier}.o"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-w", f"-DHFCA_TIER={tier}", f"-I{CSRC}"]
    command += [*flags, "-x", "c++", "-c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True)
    return target


@needs_binutils
@needs_objects
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no compiler")
def test_a_planted_flag_and_a_planted_function_are_found(tmp_path: Path) -> None:
    source = """
        #include "simd/math.h"
        void gelu(float* x) { using namespace HFCA_TIER; Simd::store(x, gelu<true>(Simd::load(x))); }
        """
    flags = ["-mavx2", "-mfma", "-DHFCA_SIMD_AVX2=1"]
    assert foreign(compile_for("avx2", flags, source, tmp_path), "avx2") == set()
    # A masked load is one that AVX2 has no instruction for.
    beyond = "#include <immintrin.h>\nvoid f(float* x) { _mm256_mask_storeu_ps(x, 3, _mm256_maskz_loadu_ps(5, x)); }"
    planted = compile_for("avx2", [*flags, "-mavx512vl"], source + beyond, tmp_path)
    assert any("evex" in line for line in foreign(planted, "avx2"))
    assert foreign(planted, "avx512") == set()

    function = "inline int twice(int x) { return 2 * x; } int (*taken())(int) { return &twice; }"
    both = [compile_for(tier, flags, function, tmp_path) for tier in ("avx2", "avx2_vnni")]
    assert shared(both) == {"_Z5twicei": {"tier_avx2", "tier_avx2_vnni"}}
