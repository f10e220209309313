"""Empty stand-ins for the CUDA libraries that torch's default build asks for, so that it can be imported where they are missing.

Their functions answer 0, but the one that counts devices, which says that there is none: torch then computes on the CPU alone.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_OF_CUDA = re.compile(r"lib(cu|nv|nccl)")
_NO_DEVICE = 100  # cudaErrorNoDevice
_UNVERSIONED = re.compile(
    r"_*(cu|nccl|nv)"
)  # names of CUDA's without a version, among all that a library lacks


@dataclass
class _Needs:
    """Attributes:
    libraries: names of libraries.
    versions: {name of a library: versions of symbols that are asked of it}.
    symbols: {version, or "": names}.
    """

    libraries: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    symbols: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def make(torch: Path, into: Path, compiler: str = "gcc") -> list[str]:
    """Compile those that the libraries of a torch package lack into a folder for LD_LIBRARY_PATH; returns their names."""
    needs = _needs(sorted(torch.glob("lib/*.so*")))
    into.mkdir(parents=True, exist_ok=True)
    for name in sorted(needs.libraries):
        groups = {version: needs.symbols[version] for version in sorted(needs.versions[name])}
        symbols = set().union(*groups.values())
        if name == min(needs.libraries):
            symbols |= {symbol for symbol in needs.symbols[""] if _UNVERSIONED.match(symbol)}
        _compile(into / name, symbols, groups, compiler)
    return sorted(needs.libraries)


def _needs(libraries: list[Path]) -> _Needs:
    needs, defined = _Needs(), set()
    for library in libraries:
        asked = re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("--dynamic", library))
        needs.libraries |= {name for name in asked if _OF_CUDA.match(name)}
        for block in _readelf("--version-info", library).split(" File: ")[1:]:
            needs.versions[block.split()[0]] |= set(re.findall(r"Name: (\S+)\s+Flags", block))
        for line in _readelf("--dyn-syms", library).splitlines():
            if found := re.match(r"\s*\d+:(?:\s+\S+){5}\s+(\S+)\s+([^@\s]+)@*(\S*)", line):
                place, symbol, version = found.groups()
                if place == "UND":
                    needs.symbols[version].add(symbol)
                else:
                    defined.add(symbol)
    needs.libraries -= {library.name for library in libraries}
    for version in needs.symbols:
        needs.symbols[version] -= defined
    return needs


def _compile(library: Path, symbols: set[str], groups: dict[str, set[str]], compiler: str) -> None:
    answers = {symbol: _NO_DEVICE if symbol == "cudaGetDeviceCount" else 0 for symbol in sorted(symbols)}
    source = "".join(f"long {symbol}(void) {{ return {answer}; }}\n" for symbol, answer in answers.items())
    script = library.with_suffix(".versions")
    script.write_text(
        "".join(
            f"{version} {{ {'global: ' * bool(names)}{' '.join(f'{name};' for name in sorted(names))} }};\n"
            for version, names in groups.items()
        )
    )
    versions = [f"-Wl,--version-script={script}"] * bool(groups)
    flags = ["-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{library.name}", *versions]
    subprocess.run([compiler, *flags, "-x", "c", "-", "-o", library], input=source, text=True, check=True)


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, library]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
