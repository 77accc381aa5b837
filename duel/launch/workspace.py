"""A workspace of Weights & Biases in which both frameworks share each panel, for people with an account."""

from typing import Any

from duel.catalogue import FRAMEWORKS
from duel.errors import UserError

NAME = "JAX and PyTorch"
# Panels by section: what is logged per step, and a run's final values (duel.measure.sinks names both).
CURVES = {"loss": "Training loss", "throughput": "Throughput", "step_seconds": "Step time (s)"}
ENDS = {
    "throughput": "Throughput",
    "step_seconds_p50": "Step time, median (s)",
    "peak_memory_bytes": "Peak memory (B)",
    "cold_start_seconds": "Cold start (s)",
    "joules_per_item": "Energy per item (J)",
    "accuracy": "Held-out accuracy",
}


def build(entity: str, project: str) -> Any:
    """Build the workspace, which ``save`` sends."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2 import interface as panels

    def names(column: str) -> list[Any]:
        return [f"{framework}/{column}" for framework in FRAMEWORKS]

    curves: list[Any] = [panels.LinePlot(title=title, x="step", y=names(column)) for column, title in CURVES.items()]
    ends: list[Any] = [panels.BarPlot(title=title, metrics=names(column)) for column, title in ENDS.items()]
    pairs: list[Any] = [panels.BarPlot(title="JAX / PyTorch", metrics=["pair/ratio"])]
    sections = [
        workspaces.Section(name=name, panels=shown, is_open=True)
        for name, shown in (("Pairs", pairs), ("While it runs", curves), ("At the end", ends))
    ]
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def save(entity: str, project: str) -> str:
    """Create the workspace in ``project`` and return its URL. Raises UserError without a key, or if W&B refuses."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("no Weights & Biases key here: '.venv/driver/bin/python -m wandb login' stores one")
    built = build(entity, project)
    try:
        return str(built.save().url)
    except Exception as error:  # wandb may raise anything, including transport errors
        raise UserError(
            f"Weights & Biases has not saved the workspace: {' '.join(str(error).split())[:200]}"
        ) from error
