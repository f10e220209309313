"""Builds the kernels: one abi3 extension on torch's stable ABI, with every instruction-set tier of this architecture in it.

torch is deliberately not a build requirement (an isolated build would download the CUDA build): its headers and
libtorch_cpu are taken from the environment that installs this package, or from HF_CPU_ACCEL_TORCH_ROOT.
The build of a package without a compiler or without torch goes on without the extension: the package then runs its plain-torch
references and says so in `hf-cpu-accel doctor`. HF_CPU_ACCEL_REQUIRE_EXTENSION=1 turns that into an error.
"""

import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
        jobs: list[tuple[list[str], Path]] = []
        for tier, source, flags in TIER_OBJECTS:
            target = build / f"tier_{tier}.o"
            command = [*common, *flags, f"-DHFCA_TIER={tier}", "-c", str(CSRC / source), "-o", str(target)]
            jobs.append((command, target))
        python = ["-DPy_LIMITED_API=0x030A0000", f"-I{sysconfig.get_paths()['include']}"]
        # Its headers write their paths into messages.
        torch = [*STABLE_ABI, f"-isystem{root / 'include'}", f"-fmacro-prefix-map={root}=torch"]
        for source in [
            *(CSRC / name for name in PLAIN_SOURCES),
            *sorted((CSRC / "ops").rglob("*.cpp")),
        ]:
            target = build / f"{'_'.join(source.relative_to(CSRC).with_suffix('').parts)}.o"
            jobs.append(([*common, *python, *torch, "-c", str(source), "-o", str(target)], target))
        # For clang-tidy and editors.
        commands = [
            {"directory": os.getcwd(), "file": command[-3], "output": str(target), "arguments": command}
            for command, target in jobs
        ]
        (build / "compile_commands.json").write_text(json.dumps(commands, indent=1))
        sources = (*CSRC.rglob("*.*"), Path("setup.py"), root / "version.py")
        newest = max(p.stat().st_mtime for p in sources)
        stale = [
            (command, target)
            for command, target in jobs
            if not target.exists() or target.stat().st_mtime < newest
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: subprocess.run(job[0], check=True), stale))
        library = build / "_C.abi3.so" if sanitize else Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        link = [
            CXX,
            "-shared",
            *(SANITIZER if sanitize else []),
            *shlex.split(os.environ.get("LDFLAGS", "")),
            *(str(target) for _, target in jobs),
            "-Wl,--no-as-needed",
            str(stand_in_for_torch(build)),
            "-o",
            str(library),
        ]
        subprocess.run(link, check=True)


def stand_in_for_torch(folder: Path) -> Path:
    """An empty library of the name of torch's: the loader finds the symbols in torch's own, which may be another machine's."""
    library = folder / "libtorch_cpu.so"
    empty = ["-x", "c", os.devnull]
    subprocess.run(
        [CXX, "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", *empty, "-o", library], check=True
    )
    return library


setup(
    ext_modules=[Extension("hf_cpu_accel._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
