"""Printed table of a memory plan: bytes of each process by purpose."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from raylight.trainer.cluster_fit.memory_plan import MemoryPlan
from raylight.trainer.cluster_fit.role_memory import RoleMemory
from raylight.trainer.cluster_fit.shortages import gib

BILLION = 1e9


def print_plan(plan: MemoryPlan, console: Console | None = None) -> None:
    """Print the model, the cluster, a table of each role, and the result."""
    shape, console = plan.shape, console or Console(highlight=False)
    console.print(
        f"{shape.architecture}, {shape.parameters / BILLION:.2f} billion parameters, {shape.layers} layers",
        style="bold",
    )
    console.print(f"{plan.cluster}\n")
    console.print(_table(plan))
    for role in plan.roles:
        if role.note:
            console.print(f"{role.role}: {role.note}")
    console.print()
    if not plan.shortages:
        console.print("the run fits", style="bold green")
        return
    for shortage in plan.shortages:
        console.print(f"✗ {shortage.message}", style="red", soft_wrap=True)
    if plan.remedies:
        changes = " ".join(f"--set {remedy}" for remedy in plan.remedies)
        console.print(f"it fits with: {changes}", soft_wrap=True)
    else:
        console.print("no setting makes it fit: take more or larger machines, or a smaller model")


def _table(plan: MemoryPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("", "left"), ("GPU", "right"), ("host", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for role in plan.roles:
        on_gpu = bool(role.gpus)
        sizes = (gib(role.total("device")) if on_gpu else "", gib(role.total("host")))
        table.add_row(f"[bold]{_title(role)}", *sizes)
        for item in role.items:
            on_device = on_gpu and item.place == "device"
            size = gib(item.size)
            table.add_row(f"  {item.name}", *((size, "") if on_device else ("", size)), style="dim")
    return table


def _title(role: RoleMemory) -> str:
    where = f", {role.gpus:g} GPU each" if role.gpus else ""
    return f"{role.role} x {role.processes}{where}" if role.processes > 1 else f"{role.role}{where}"


def print_json(plan: MemoryPlan) -> None:
    """Print the plan as a JSON object; sizes are in bytes."""
    content = {
        "model": vars(plan.shape),
        "cluster": [vars(node) for node in plan.cluster.nodes],
        "roles": [
            {
                "role": role.role,
                "processes": role.processes,
                "gpus": role.gpus,
                "device": role.total("device"),
                "host": role.total("host"),
                "items": [vars(item) for item in role.items],
                "note": role.note,
            }
            for role in plan.roles
        ],
        "fits": not plan.shortages,
        "shortages": [shortage.message for shortage in plan.shortages],
        "remedies": list(plan.remedies),
    }
    print(json.dumps(content, indent=2))
