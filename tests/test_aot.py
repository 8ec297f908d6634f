"""Every shipped kernel configuration compiles for every target, fits its shared memory, and does
not spill on sm90. No GPU is needed: the compilers are inside the triton wheel.

Each kernel module offers `aot_signatures()`: (kernel, signature, constexprs, launch options, arch)
rows. This file run as a script is the worker that compiles them: under TRITON_INTERPRET, which the
tests may set, kernels cannot be compiled. Results are kept in pytest's cache by file hash.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "sparsekv" / "kernels"
MODULES = sorted(path.stem for path in KERNELS.glob("[!_]*.py"))
# Bytes of shared memory one program may use (CUDA programming guide; LDS of CDNA3).
SHARED_LIMIT = {
    "sm80": 163 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm120": 99 << 10,
    "gfx942": 64 << 10,
}
# Stores to local memory that are no spill of a tile: a pointer or two that is put aside once, which
# triton 3.7's assembler does where 3.6's and 3.9's do not.
SCALARS = 2 if triton.__version__.startswith("3.7.") else 0


# --- worker process -----------------------------------------------------------------------------


def _rows(module: str) -> list | str:
    """aot_signatures() of a kernel module, or why there are none."""
    kernels = importlib.import_module(f"sparsekv.kernels.{module}")
    if not hasattr(kernels, "aot_signatures"):
        return f"sparsekv/kernels/{module}.py has no aot_signatures()"
    return kernels.aot_signatures()


def _disassemble(cubin: bytes) -> list[tuple[str, str]]:
    """(instruction, operands) of a cubin, in order; a jump target is ("label", name)."""
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([nvdisasm, file.name], capture_output=True, text=True, check=True)
    pattern = r"^\s*(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)\s*(.*?);"
    found = re.findall(pattern, sass.stdout, re.MULTILINE)
    return [("label", label) if label else (name, operands) for label, name, operands in found]


def _matrix_loops(code: list[tuple[str, str]]) -> list[list[str]]:
    """Instructions of every innermost loop that multiplies matrices asynchronously."""
    targets = {operands: i for i, (name, operands) in enumerate(code) if name == "label"}
    loops = []
    for end, (name, operands) in enumerate(code):
        jump = re.search(r"\((\.L_x_\d+)\)", operands) if name.startswith("BRA") else None
        start = targets.get(jump.group(1), end) if jump else end
        if start < end:
            loops.append((start, end))
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    bodies = [[name for name, _ in code[start : end + 1]] for start, end in inner]
    return [body for body in bodies if any(name.startswith("HGMMA") for name in body)]


def _sm90_findings(cubin: bytes, gluon: bool) -> dict[str, int]:
    """spills: stores to local memory, beyond a few. exposed: exp2 that no matrix instruction hides.

    A hand-scheduled (Gluon) kernel walks over many blocks of rows and may spill scalars from one to
    the next: there only its matrix loops count, and all their exp2 come before the last wait.
    """
    code = _disassemble(cubin)
    if not gluon:
        spills = sum(name == "STL" for name, _ in code)
        return {"spills": spills if spills > SCALARS else 0, "exposed": 0}
    loops = _matrix_loops(code)
    assert loops, "expected loops with wgmma, got none"
    exposed = 0
    for body in loops:
        waits = [i for i, name in enumerate(body) if name.startswith("WARPGROUP.DEPBAR")]
        exposed += sum(name.startswith("MUFU.EX2") for name in body[waits[-1] :])
    spills = sum(name in ("STL", "LDL") for body in loops for name in body)
    return {"spills": spills, "exposed": exposed}


def _compile(job: tuple[str, int]) -> dict:
    """Compile row `index` of `module`; pointers and strides are taken to be multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, index = job
    kernel, signature, constexprs, options, arch = _rows(module)[index]
    shown = {name: getattr(value, "__name__", value) for name, value in constexprs.items()}
    label = f"{kernel.__name__} {shown} {options}"
    hip = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if hip else GPUTarget("cuda", int(arch[2:]), 32)
    try:
        types = {
            param.name: "constexpr" if param.name in constexprs else signature[param.name]
            for param in kernel.params
        }
        attrs = {
            (param.num,): [["tt.divisibility", 16]]
            for param in kernel.params
            if types[param.name].startswith("*")
            or (types[param.name][0] == "i" and "stride" in param.name)
        }
        gluon = kernel.is_gluon()
        source = (GluonASTSource if gluon else ASTSource)(kernel, types, constexprs, attrs)
        binary = triton.compile(source, target=target, options=dict(options))
        findings = _sm90_findings(binary.asm["cubin"], gluon) if arch == "sm90" else {}
    except Exception as error:
        return {"row": label, "error": f"{type(error).__name__}: {error}"[:2000]}
    return {"row": label, "shared": binary.metadata.shared} | findings


def worker(arch: str, modules: list[str]) -> dict[str, list | str]:
    """Results of every row for `arch`, by module."""
    rows = {module: _rows(module) for module in modules}
    jobs = [
        (module, index)
        for module, listed in rows.items()
        if not isinstance(listed, str)
        for index, row in enumerate(listed)
        if row[4] == arch
    ]
    results: dict[str, list | str] = {
        module: listed if isinstance(listed, str) else [] for module, listed in rows.items()
    }
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 8)) as pool:
        for (module, _), result in zip(jobs, pool.imap(_compile, jobs, chunksize=1), strict=True):
            results[module].append(result)
    return results


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(json.dumps(worker(sys.argv[1], sys.argv[2:])))
    sys.exit()


# --- tests --------------------------------------------------------------------------------------


def _key(module: str, arch: str) -> str:
    """Changes when anything that the compiled code depends on changes."""
    files = [Path(__file__), KERNELS / f"{module}.py", *sorted(KERNELS.glob("_*.py"))]
    digest = hashlib.sha256(f"{triton.__version__} {module} {arch}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


def _run_worker(arch: str, modules: list[str]) -> dict[str, list | str]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, arch, *modules]
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert run.returncode == 0, f"the worker failed:\n{run.stderr[-4000:]}"
    return json.loads(run.stdout.splitlines()[-1])


def _succeeded(result: list | str) -> bool:
    return bool(result) and not isinstance(result, str) and all("error" not in r for r in result)


def _items(request: pytest.FixtureRequest) -> list[pytest.Function]:
    """The tests of this file that were selected (-k and the like)."""
    return [item for item in request.session.items if item.path == Path(__file__)]


@pytest.fixture(scope="module", params=list(SHARED_LIMIT))
def compiled(request: pytest.FixtureRequest) -> tuple[str, dict[str, list | str]]:
    """(arch, results by module); only what changed since the last run is compiled."""
    arch, cache = request.param, request.config.cache.mkdir("sparsekv_aot")
    selected = {item.callspec.params["module"] for item in _items(request)}
    files = {module: cache / f"{_key(module, arch)}.json" for module in sorted(selected)}
    results = {m: json.loads(f.read_text()) for m, f in files.items() if f.exists()}
    missing = [module for module in files if module not in results]
    fresh = _run_worker(arch, missing) if missing else {}
    for module, result in fresh.items():
        if _succeeded(result):  # a failure may be the machine's: try again next time
            files[module].write_text(json.dumps(result))
    return arch, results | fresh


@pytest.mark.parametrize("module", MODULES)
def test_compiles_and_fits(compiled: tuple[str, dict[str, list | str]], module: str) -> None:
    arch, results = compiled
    rows = results[module]
    assert not isinstance(rows, str), rows
    assert rows, f"aot_signatures() of {module} has no row for {arch}"
    bad = [f"{row['row']}: {row['error']}" for row in rows if "error" in row]
    assert not bad, f"{module} does not compile for {arch}:\n" + "\n".join(bad)
    limit = SHARED_LIMIT[arch]
    bad = [f"{row['row']}: {row['shared']}" for row in rows if row["shared"] > limit]
    assert not bad, f"{module} on {arch}: expected shared memory <= {limit}, got\n" + "\n".join(bad)
    bad = [f"{row['row']}: {row['spills']}" for row in rows if row.get("spills")]
    assert not bad, f"{module} on {arch}: expected no local-memory stores, got\n" + "\n".join(bad)
    bad = [f"{row['row']}: {row['exposed']}" for row in rows if row.get("exposed")]
    assert not bad, f"{module} on {arch}: expected exp2 under wgmma, got\n" + "\n".join(bad)
