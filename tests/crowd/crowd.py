"""Environments in which raylight runs together with packages that people have installed.

An environment adds one package to the tests' own: a `.pth` file makes those modules importable,
so that uv installs only what is missing, or what the package needs in another version.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROGRAM = Path(__file__).with_name("one_step.py")
PACKAGES = (
    "accelerate",
    "chromadb",
    "datasets",
    "gradio",
    "jax",
    "langchain",
    "mlflow",
    "opencv-python-headless",
    "pandas",
    "scikit-learn",
    "scipy",
    "sentence-transformers",
    "spacy",
    "tensorflow-cpu",
    "wandb",
)
PIP_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 1200.0
HEADER = "| package | result | seconds | other versions |\n|---|---|---|---|"
LAST_LINES = 12
"""Lines of a program's output that a result keeps."""
RAN = "trained"
UNRESOLVED = "does not resolve"


@dataclass
class Result:
    """Outcome of a run in one environment."""

    packages: list[str]
    versions: dict[str, str]
    outcome: str
    """`RAN`, `UNRESOLVED`, or the phase that failed."""
    seconds: float
    """Time of the run, or of what failed before."""
    replaced: dict[str, str]
    """Packages of the tests' environment that are in another version here."""
    output: str = ""
    """End of the output of what failed."""

    def row(self) -> str:
        """Return a row of a Markdown table."""
        names = ", ".join(f"{name} {self.versions.get(name, '-')}" for name in self.packages)
        other = ", ".join(f"{name} {version}" for name, version in self.replaced.items()) or "-"
        return f"| {names} | {self.outcome} | {self.seconds:.0f} | {other} |"


def selected_package(commit: str) -> str:
    """Return the package that a commit's hash selects."""
    return PACKAGES[int(commit, 16) % len(PACKAGES)]


def requirements() -> list[str]:
    """Return what raylight itself requires, without its extras."""
    declared = map(Requirement, importlib.metadata.requires("raylight") or ())
    return [str(found) for found in declared if found.marker is None or found.marker.evaluate({"extra": ""})]


def create(folder: Path) -> Path:
    """Create an environment that has all packages of this one; return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    layout = {"base": str(folder), "platbase": str(folder)}
    added = Path(sysconfig.get_path("purelib", "venv", layout))
    shared = sysconfig.get_path("purelib")
    (added / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    return python


def installed(python: Path) -> dict[str, str]:
    """Return the versions that an environment's Python finds, by canonical name."""
    code = (
        "import importlib.metadata as m, json\n"
        "found = {}\n"
        "for d in m.distributions(): found.setdefault(d.name, d.version)\n"
        "print(json.dumps(found))"
    )
    found = json.loads(subprocess.check_output([python, "-c", code], text=True))
    return {canonicalize_name(name): version for name, version in found.items()}


def resolve(packages: list[str], folder: Path, present: dict[str, str]) -> dict[str, str] | str:
    """Return the versions of packages, of what raylight requires and of what these require.

    Versions that are present are kept where they fit. The resolver's message is returned if there are none.
    """
    wanted, chosen = folder / "requirements.in", folder / "requirements.txt"
    wanted.write_text("\n".join([*requirements(), *packages]))
    chosen.write_text("\n".join(f"{name}=={Version(version).public}" for name, version in present.items()))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = ["uv", "pip", "compile", "--no-header", "--no-annotate", "--python-version", version]
    done = run([*command, str(wanted), "-o", str(chosen)], folder, PIP_TIMEOUT_S)
    if done.returncode:
        return done.stdout
    lines = [line.partition(";")[0].strip() for line in chosen.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): next(iter(one.specifier)).version for one in found}


def try_together(packages: list[str], folder: Path) -> Result:
    """Install packages, train for a step in their environment, and delete it."""
    python = create(folder / "env")
    present = installed(python)
    began = time.monotonic()
    try:
        chosen = resolve(packages, folder, present)
        if isinstance(chosen, str):
            return Result(packages, {}, UNRESOLVED, time.monotonic() - began, {}, tail(chosen))
        missing = {
            name: version
            for name, version in chosen.items()
            if name not in present or Version(version) != Version(Version(present[name]).public)
        }
        pins = [f"{name}=={version}" for name, version in missing.items()]
        pip = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", str(python), *pins]
        done = run(pip, folder, PIP_TIMEOUT_S) if pins else None
        versions = {name: chosen[canonicalize_name(Requirement(name).name)] for name in packages}
        replaced = {name: version for name, version in missing.items() if name in present}
        if done and done.returncode:
            seconds = time.monotonic() - began
            return Result(packages, versions, "not installed", seconds, replaced, tail(done.stdout))
        began = time.monotonic()
        done = run([str(python), str(PROGRAM)], folder, RUN_TIMEOUT_S)
        seconds = time.monotonic() - began
        if done.returncode or not (folder / "run" / "checkpoint").is_dir():
            return Result(packages, versions, "failed", seconds, replaced, tail(done.stdout))
        return Result(packages, versions, RAN, seconds, replaced)
    finally:
        shutil.rmtree(folder / "env")


def run(command: list[str], folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder. One that takes too long fails with its output so far."""
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    log = folder / "output"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # the run then stops its cluster
            process.wait(60)
            code = -1
    return subprocess.CompletedProcess(command, code, log.read_text())


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:])


def main(names: list[str]) -> None:
    """Print the table of some packages, or of all and of all that resolve, one row when it is known."""
    import tempfile

    results = []
    print(HEADER)
    for packages in [names] if names else [[name] for name in PACKAGES] + [[]]:
        if not packages:
            packages = [result.packages[0] for result in results if result.outcome != UNRESOLVED]
        with tempfile.TemporaryDirectory(prefix="crowd-") as folder:
            results.append(try_together(packages, Path(folder)))
        print(results[-1].row(), results[-1].output, sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
