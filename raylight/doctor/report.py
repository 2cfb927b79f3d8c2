"""Report of `raylight doctor`: as text or as JSON, and the removal of what ended runs left."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from raylight import __version__
from raylight._utils.broken_packages import import_packages, installed
from raylight.algorithms.policy import GRPO, RunSettings
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig
from raylight.doctor.facts import (
    GIB,
    PORTS,
    Cluster,
    Machine,
    Packages,
    Problem,
    find_problems,
    gather_cluster,
    gather_machine,
    gather_packages,
    hint,
    installed_vllm,
    load_xgrammar,
    size,
    xgrammar_problem,
)
from raylight.engines.model_report import ModelReport, report_model
from raylight.engines.registry import ENGINES, choose_engine, model_engines
from raylight.errors import ConfigError
from raylight.serving.deploy.leftovers import Leftover, find_leftovers, remove
from raylight.trainer.cluster_fit.cluster_settings import plan_settings
from raylight.trainer.cluster_fit.cluster_shape import ClusterShape, this_machine
from raylight.trainer.spec.inputs import resolve_model

NOT_INSTALLED = hint(
    "raylight runs from a source tree and is not installed, so its requirements are not checked",
    "pip install -e . in its folder, on all nodes",
)


def examine(model: str | None = None, address: str | None = None, as_json: bool = False) -> None:
    """Examine machine, cluster and model, print the result, and exit with code 1 if something required is
    missing, else 0.

    Args:
        model: folder, or name in the local Hugging Face cache.
        address: as in `Trainer(address=...)`.
        as_json: print one JSON object.

    Raises:
        ModelNotFoundError: the model does not exist.
    """
    path = resolve_model(model) if model else None
    machine, cluster = gather_machine(), gather_cluster(address) if installed("ray") else None
    is_installed = installed("raylight") is not None
    required = importlib.metadata.requires("raylight") if is_installed else []
    packages = gather_packages(required or [])
    problems = find_problems(machine, packages, cluster) + ([] if is_installed else [NOT_INSTALLED])
    problems += [
        Problem(f"{package.summary}, which may keep models from loading", package.remedy)
        for package in import_packages()
    ]
    packages = {"raylight": __version__, **packages}
    xgrammar_error = load_xgrammar() if installed("xgrammar") else None
    if xgrammar_error:
        problems.append(xgrammar_problem(xgrammar_error))
    reports = [report_model(path, engine) for engine in model_engines()] if path else []
    used = [report for report in reports if report.engine == "transformers" or installed_vllm()]
    remedies = {name: remedy for report in used for name, remedy in report.remedies().items()}
    problems += [hint(name, remedy) for name, remedy in remedies.items()]
    if path:
        refusal = find_refusal(path)
        problems += [refusal] if refusal else memory_problems(path)
    leftovers = find_leftovers()
    # every Ray session leaves its logs, which is worth a remark only if they are large
    if any(one.kind != "session" for one in leftovers) or sum(one.size for one in leftovers) > GIB:
        problems.append(leftovers_problem(leftovers))
    if as_json:
        parts = {"machine": machine, "packages": packages, "cluster": cluster, "models": reports}
        print_json(**parts, leftovers=leftovers, problems=problems)
    else:
        console = Console(markup=False, highlight=False)
        render(machine, packages, cluster, problems, console, xgrammar_error, reports)
    sys.exit(int(any(problem.required for problem in problems)))


def find_refusal(path: str) -> Problem | None:
    """Return the reason for which a model cannot be trained, None if it can."""
    from raylight.learner.model.model_check import check_model

    try:
        check_model(path)
    except ConfigError as error:
        reason, _, remedy = str(error).rpartition("; ")
        return hint(reason, remedy)
    return None


def clean(as_json: bool = False, unread: Mapping[str, str | None] | None = None) -> None:
    """Remove what ended runs left on this machine, list it, and exit with code 1 if something could not be
    removed, else 0.

    Args:
        as_json: print one JSON object.
        unread: options that nothing reads here, each by its name; None if it was not given.

    Raises:
        ConfigError: one of these options was given.
    """
    for name, value in (unread or {}).items():
        if value is not None:
            raise ConfigError(
                f"nothing reads {name} with --clean, which cleans this machine only; leave it out"
            )
    found = find_leftovers()
    done = [remove(leftover) for leftover in found]
    removed = [leftover for leftover, success in zip(found, done, strict=True) if success]
    kept = [leftover for leftover in found if leftover not in removed]
    if as_json:
        print_json(removed=removed, not_removed=kept)
    else:
        console = Console(markup=False, highlight=False)
        for leftover in found:
            verb = "removed" if leftover in removed else "could not remove"
            console.print(f"{verb} the {leftover}", soft_wrap=True)
        freed = sum(leftover.size for leftover in removed)
        console.print(f"{size(freed)} freed" if found else "ended runs left nothing on this machine")
    sys.exit(int(bool(kept)))


def memory_problems(model_path: str) -> list[Problem]:
    """Return what this machine lacks for training a model with GRPO's defaults."""
    plan = plan_settings(
        GRPO(model=model_path),
        RunSettings(EngineConfig(), LearnerConfig(), CheckpointConfig()),
        RunnerConfig(),
        ClusterShape((this_machine(),)),
    )
    remedy = f"train with {', '.join(plan.remedies)}" if plan.remedies else "train on larger machines"
    return [
        hint(f"this machine cannot train the model: {shortage.message}", remedy)
        for shortage in plan.shortages
    ]


def leftovers_problem(leftovers: Sequence[Leftover]) -> Problem:
    """Return the problem of what ended runs left on this machine."""
    total = size(sum(leftover.size for leftover in leftovers))
    count = f"{len(leftovers)} process{'es' * (len(leftovers) != 1)} or folder{'s' * (len(leftovers) != 1)}"
    return hint(f"ended runs left {count} ({total})", "raylight doctor --clean")


def print_json(**parts: object) -> None:
    print(json.dumps(parts, default=dataclasses.asdict, indent=2))


def render(
    machine: Machine,
    packages: Packages,
    cluster: Cluster | None,
    problems: list[Problem],
    console: Console,
    xgrammar_error: str | None = None,
    reports: Sequence[ModelReport] = (),
) -> None:
    """Print the records and the problems."""
    vllm = installed_vllm()
    gpus = sum(n.resources.get("GPU", 0) for n in cluster.nodes) if cluster else len(machine.gpus)
    ports = {
        f"port {port}": f"{'free' if free else 'in use'} ({PORTS[port]})"
        for port, free in machine.ports_free.items()
    }
    print_section(
        console,
        "machine",
        {
            "python": machine.python,
            "CPUs": str(machine.cpus),
            "memory": size(machine.memory),
            "/dev/shm": size(machine.shm),
            "free disk": size(machine.disk_free),
            "GPUs": "; ".join(machine.gpus) or "none: training runs on the CPU",
            "HAProxy": f"{machine.haproxy or 'none'}, {machine.connections} connections",
            **ports,
        },
    )
    versions = {**packages, "vllm (optional)": vllm}
    print_section(console, "packages", {wanted: version or "-" for wanted, version in versions.items()})
    print_section(console, "Ray cluster", cluster_rows(cluster))
    engine = choose_engine(EngineConfig(num_gpus=min(gpus, 1)))
    why = f"of {', '.join(ENGINES)}; vLLM {vllm or 'absent'}, {gpus:g} GPUs"
    xgrammar = installed("xgrammar")
    grammar = f"xgrammar {xgrammar}, {xgrammar_error or 'works'}" if xgrammar else "none: xgrammar is absent"
    print_section(console, "engine", {"auto": f"{engine} ({why})", "constrained answers": grammar})
    for report in reports:
        print_section(console, f"model, {report.engine} engine", report.rows())
    print_section(console, "missing", {} if problems else {"nothing": ""})
    for problem in problems:
        console.print(
            f"  {'✗' if problem.required else '!'} {problem.summary}\n      {problem.remedy}", soft_wrap=True
        )


def cluster_rows(cluster: Cluster | None) -> dict[str, str]:
    if cluster is None:
        return {"none": "a run starts a local one"}
    serve = f"on {cluster.serve[0]}:{cluster.serve[1]}" if cluster.serve else "not running; a run starts it"
    rows = {"address": cluster.address} | (
        {"error": cluster.error} if cluster.error else {"Ray Serve": serve}
    )
    for node in cluster.nodes:
        amounts = ", ".join(f"{node.resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        flags = (
            "Serve flags unknown" if node.error else f"Serve flags {'missing' if node.unset_flags else 'set'}"
        )
        amounts += f", {size(node.resources.get('memory'))}, raylight {node.raylight or 'unknown'}"
        amounts += f", vllm {node.vllm}" if node.vllm else ""
        rows[f"node {node.address}"] = f"{amounts}, {flags}"
    return rows


def print_section(console: Console, title: str, rows: dict[str, str]) -> None:
    console.print(f"\n{title}", style="bold")
    for name, value in rows.items():
        console.print(f"  {name:<28} {value}", soft_wrap=True)
