"""Build the kernels: one abi3 extension on torch's stable ABI, with every instruction-set tier of this architecture in it.

torch is deliberately not a build requirement (an isolated build would download the CUDA build): its headers and
libtorch_cpu are taken from the environment that installs this package, or from HF_CPU_ACCEL_TORCH_ROOT.
The build of a package without a compiler or without torch goes on without the extension: the package then runs its plain-torch
references and says so in `hf-cpu-accel doctor`. HF_CPU_ACCEL_REQUIRE_EXTENSION=1 turns that into an error.

HF_CPU_ACCEL_TIERS chooses the tiers; `generic` is always built:
- `all`, the default. Packages are built so.
- `native`: the best tier of this CPU, for `make demo`. Up-to-date objects of other tiers are linked, too.
- A list, for example `avx2,avx512`: these tiers alone.
"""

import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("src/hf_cpu_accel/csrc")
CXX = os.environ.get("CXX", "g++")


def machine_compiled_for() -> str:
    """As `uname -m` says it there, since CXX may be a cross compiler; without a compiler, of this machine."""
    try:
        said = subprocess.run([CXX, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.machine().lower()
    return said.split("-")[0]


MACHINE = machine_compiled_for()
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [
    *AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
]
X86_TIERS = {
    "avx2": (AVX2, "HFCA_SIMD_AVX2"),
    "avx2_vnni": ([*AVX2, "-mavxvnni"], "HFCA_SIMD_AVX2"),
    "avx512": (AVX512, "HFCA_SIMD_AVX512"),
    "avx512_vnni": ([*AVX512, "-mavx512vnni"], "HFCA_SIMD_AVX512"),
    "avx512_bf16": ([*AVX512, "-mavx512vnni", "-mavx512bf16"], "HFCA_SIMD_AVX512"),
}
# The GEMMs of AMX tiles, over the other kernels of a tier below: csrc/tile_tier.cpp.
TILE_TIERS = {
    "amx": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    "amx_emulated": [*AVX512, "-mavx512vnni", "-DHFCA_EMULATED_TILES=1"],
}
NEON = "-march=armv8.2-a+dotprod"
ARM_TIERS = {
    "neon_dotprod": ([NEON], "HFCA_SIMD_NEON"),
    "neon_i8mm_bf16": ([f"{NEON}+i8mm+bf16"], "HFCA_SIMD_NEON"),
}
X86 = MACHINE in ("x86_64", "amd64")
ARM = MACHINE == "aarch64"  # as Linux calls it: what a CPU has is asked of Linux
TIERS = {"generic": ([], "HFCA_SIMD_GENERIC"), **(X86_TIERS if X86 else ARM_TIERS if ARM else {})}
# (tier, source, flags)
TIER_OBJECTS = [
    *((tier, "tier.cpp", [*flags, f"-D{simd}=1"]) for tier, (flags, simd) in TIERS.items()),
    *((tier, "tile_tier.cpp", [*flags, "-DHFCA_SIMD_AVX512=1"]) for tier, flags in TILE_TIERS.items() if X86),
]
TIERS_VARIABLE = "HF_CPU_ACCEL_TIERS"
# Flags of /proc/cpuinfo that `native` asks for, as runtime/hardware.py does. "amx_emulated" is only for tests.
NATIVE_FLAGS = {
    "generic": "",
    "avx2": "avx2 fma f16c",
    "avx2_vnni": "avx2 fma f16c avx_vnni",
    "avx512": "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512cd",
}
NATIVE_FLAGS |= {
    "avx512_vnni": f"{NATIVE_FLAGS['avx512']} avx512_vnni",
    "avx512_bf16": f"{NATIVE_FLAGS['avx512']} avx512_vnni avx512_bf16",
    "amx": f"{NATIVE_FLAGS['avx512']} avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8",
    "neon_dotprod": "asimddp",
    "neon_i8mm_bf16": "asimddp i8mm bf16",
}
# The tier whose kernels a tier of tiles completes: csrc/dispatch.cpp.
BELOW_TILES = {"amx": "avx512_bf16", "amx_emulated": "avx512_vnni"}
PLAIN_SOURCES = (
    "buffers.cpp",
    "dispatch.cpp",
    "manylinux.cpp",
    "module.cpp",
    *(("amx_permission.cpp", "tile_check.cpp") if X86 else ()),
)
SANITIZER = [
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
]
# torch 2.11 is the oldest release that pyproject.toml admits.
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]


def torch_root() -> Path:
    """The folder of the installed torch package, found without importing it."""
    candidates = [os.environ.get("HF_CPU_ACCEL_TORCH_ROOT")]
    spec = importlib.util.find_spec("torch")
    candidates += [str(Path(spec.origin).parent)] if spec and spec.origin else []
    # An isolated build keeps the target interpreter: its site-packages still hold torch.
    candidates += [str(Path(sysconfig.get_paths()[scheme]) / "torch") for scheme in ("purelib", "platlib")]
    for root in filter(None, candidates):
        if (Path(root) / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
            return Path(root)
    raise RuntimeError(
        "building the kernels needs torch >= 2.11 in the environment that installs hf_cpu_accel "
        "(pip install torch first, or set HF_CPU_ACCEL_TORCH_ROOT to its folder)"
    )


class Job(NamedTuple):
    """One object file; `tier` is None where every CPU runs it."""

    tier: str | None
    command: list[str]
    target: Path


def tiers_to_build(wanted: str, flags: Collection[str]) -> list[str]:
    """Return the tiers that HF_CPU_ACCEL_TIERS asks for and those that these need, from the lowest to the highest.

    Args:
        wanted: "all", "native" or tiers, separated by commas or spaces.
        flags: the CPU's, as /proc/cpuinfo names them; only for "native".

    Raises:
        ValueError: `wanted` names no tier of this architecture.
    """
    known = [tier for tier, _, _ in TIER_OBJECTS]
    words = wanted.replace(",", " ").split()
    if words == ["all"]:
        return known
    if words == ["native"]:
        words = [tier for tier in known if set(NATIVE_FLAGS.get(tier, tier).split()) <= set(flags)][-1:]
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise ValueError(
            f"{TIERS_VARIABLE}={wanted!r}: {', '.join(unknown) or 'nothing'} is no tier of {MACHINE}; "
            f"accepted: all, native, or some of {', '.join(known)}"
        )
    needed = {"generic", *words, *(BELOW_TILES[word] for word in words if word in BELOW_TILES)}
    return [tier for tier in known if tier in needed]


def cpu_flags() -> list[str]:
    """Return the flags of this CPU in /proc/cpuinfo.

    Raises:
        ValueError: the kernels are compiled for another machine, or this system has no /proc/cpuinfo.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine().lower() != MACHINE or not cpuinfo.exists():
        raise ValueError(
            f"{TIERS_VARIABLE}=native needs /proc/cpuinfo of the machine that runs the kernels; "
            "name its tiers instead, or all"
        )
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return listed[1].split() if listed else []


def jobs_to_link(jobs: list[Job], wanted: str, fresh: Callable[[Path], bool]) -> list[Job]:
    """Return the objects of a library with the `wanted` tiers: `tiers_to_build`, whose errors it raises.

    With "native", up-to-date objects of all other tiers are linked, too, and `generic`, which only lower CPUs run, is compiled at
    -O1: that takes half the time. A complete library stays complete, and a later build for all tiers compiles the others.
    """
    native = wanted.strip() == "native"
    tiers = tiers_to_build(wanted, cpu_flags() if native else ())
    if not native:
        return [job for job in jobs if job.tier is None or job.tier in tiers]
    linked = [job for job in jobs if job.tier is None or job.tier in tiers or fresh(job.target)]
    if tiers == ["generic"]:
        return linked
    return [quick(job) if job.tier == "generic" and not fresh(job.target) else job for job in linked]


def quick(job: Job) -> Job:
    """Return the job at -O1, with its object in another folder."""
    target = job.target.parent / "quick" / job.target.name
    return Job(job.tier, [*job.command[:-1], str(target), "-O1"], target)


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        ext.optional = os.environ.get("HF_CPU_ACCEL_REQUIRE_EXTENSION") != "1"
        try:
            self._compile(ext)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            if not ext.optional:
                raise
            # Kernels of an earlier build must not go on serving newer Python code.
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            for stale in Path("src/hf_cpu_accel").glob("_C*.so"):
                stale.unlink()
            self.warn(f"kernels not built, plain-torch references will serve: {error}")

    def _compile(self, ext: Extension) -> None:
        root = torch_root()
        # Not build_temp, which is another folder for an editable install than for `build_ext --inplace`: one build serves both.
        sanitize = os.environ.get("HF_CPU_ACCEL_SANITIZE") == "1"  # `make asan`
        crossed = "" if platform.machine().lower() == MACHINE else f"-{MACHINE}"
        build = Path("build") / f"{'asan' if sanitize else 'kernels'}{crossed}"
        build.mkdir(parents=True, exist_ok=True)
        common = [
            CXX,
            "-std=c++17",
            "-O3",
            "-fPIC",
            "-fvisibility=hidden",
            "-DNDEBUG",
            "-Wall",
            "-Wextra",
            "-Wno-unknown-pragmas",
        ]
        common += [
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
            "-Wno-psabi",
            "-Wno-array-bounds",
            "-Wno-stringop-overread",
        ]  # gcc 12 warns inside its own AVX-512 headers, and of vectors that are never stored whole
        common += ["-DHFCA_X86=1"] if X86 else ["-DHFCA_ARM=1"] if ARM else []
        # No -ffast-math: NaN and infinity must pass through. errno and traps are of no use to the kernels.
        common += ["-fno-math-errno", "-fno-trapping-math"]
        common += SANITIZER if sanitize else []
        jobs: list[Job] = []
        for tier, source, flags in TIER_OBJECTS:
            target = build / f"tier_{tier}.o"
            command = [*common, *flags, f"-DHFCA_TIER={tier}", "-c", str(CSRC / source), "-o", str(target)]
            jobs.append(Job(tier, command, target))
        python = ["-DPy_LIMITED_API=0x030A0000", f"-I{sysconfig.get_paths()['include']}"]
        # Its headers write their paths into messages.
        torch = [*STABLE_ABI, f"-isystem{root / 'include'}", f"-fmacro-prefix-map={root}=torch"]
        for source in [
            *(CSRC / name for name in PLAIN_SOURCES),
            *sorted((CSRC / "ops").rglob("*.cpp")),
        ]:
            target = build / f"{'_'.join(source.relative_to(CSRC).with_suffix('').parts)}.o"
            command = [*common, *python, *torch, "-c", str(source), "-o", str(target)]
            jobs.append(Job(None, command, target))
        # For clang-tidy and editors.
        commands = [
            {
                "directory": os.getcwd(),
                "file": job.command[-3],
                "output": str(job.target),
                "arguments": job.command,
            }
            for job in jobs
        ]
        (build / "compile_commands.json").write_text(json.dumps(commands, indent=1))
        sources = (*CSRC.rglob("*.*"), Path("setup.py"), root / "version.py")
        newest = max(p.stat().st_mtime for p in sources)

        def fresh(target: Path) -> bool:
            return target.exists() and target.stat().st_mtime >= newest

        wanted = os.environ.get(TIERS_VARIABLE, "all")
        linked = jobs_to_link(jobs, wanted, fresh)
        stale = [job for job in linked if not fresh(job.target)]
        for folder in {job.target.parent for job in stale}:
            folder.mkdir(exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: subprocess.run(job.command, check=True), stale))
        library = build / "_C.abi3.so" if sanitize else Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        link = [
            CXX,
            "-shared",
            *(SANITIZER if sanitize else []),
            *shlex.split(os.environ.get("LDFLAGS", "")),
            *(str(job.target) for job in linked),
            "-Wl,--no-as-needed",
            str(stand_in_for_torch(build)),
            "-o",
            str(library),
        ]
        subprocess.run(link, check=True)
        if len(linked) < len(jobs):
            tiers = [job.tier for job in linked if job.tier]
            print(
                f"{library.name} has only the kernels of {', '.join(tiers)}: {TIERS_VARIABLE}={wanted}",
                flush=True,
            )


def stand_in_for_torch(folder: Path) -> Path:
    """An empty library of the name of torch's: the loader finds the symbols in torch's own, which may be another machine's."""
    library = folder / "libtorch_cpu.so"
    empty = ["-x", "c", os.devnull]
    subprocess.run(
        [CXX, "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", *empty, "-o", library], check=True
    )
    return library


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("hf_cpu_accel._C", sources=[], py_limited_api=True)],
        cmdclass={"build_ext": BuildKernels},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
