"""Which variables of the calling shell reach sbatch, and through it the job.

Slurm hands a job all of sbatch's environment, and sites may store it where others can read it. A name does not reveal
whether it is secret (MY_PAT, PGPASS), so only variables listed here or in the target's ``pass_variables`` are passed.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from duel import variables
from duel.launch import directives
from duel.launch.schema import Target

# fnmatch patterns, by what needs them.
ALLOWED = {
    "shells": ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "PWD"),
    "Slurm": ("SLURM_CONF", "KRB5CCNAME", "KRB5_CONFIG"),
    # BASH_ENV and exported functions define the command 'module' in a script, which is not a login shell.
    "modules": (
        *("MODULE*", "LOADEDMODULES", "_LMFILES_*", "LMOD_*", "_LMOD_*", "__LMOD_*", "__MODULES_*", "_ModuleTable*"),
        *("BASH_ENV", "BASH_FUNC_module*", "BASH_FUNC_ml%%", "BASH_FUNC__module*", "BASH_FUNC_switchml*"),
        *("EBROOT*", "EBVERSION*", "EBDEVEL*", "PE_*", "CRAY*"),
    ),
    # Modules, Conda and a site's profile set folders, with these endings: SCRATCH_DIR, OPAL_PREFIX, CUDA_HOME.
    "folders": ("*_HOME", "*_ROOT", "*_DIR", "*_PATH", "*_PREFIX", "LIBRARY_PATH", "CPATH", "MANPATH", "INFOPATH"),
    "file systems": ("SCRATCH", "PSCRATCH", "WORK", "PROJECT", "STORE", "CFS"),
    "Python": ("PYTHON*", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_SHLVL", "CONDA_PYTHON_EXE"),
    "network": (
        *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    ),
    # docs.wandb.ai/guides/track/environment-variables; where a key is stored, never the key itself
    "Weights & Biases": (
        *("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_BASE_URL", "WANDB_HOST", "WANDB_TAGS", "WANDB_NOTES"),
        *("WANDB_DISABLE_GIT", "WANDB__DISABLE_*", "WANDB__SAVE_REQUIREMENTS", "WANDB_SILENT", "WANDB_CONSOLE"),
        *("WANDB_HTTP_TIMEOUT", "WANDB_INIT_TIMEOUT", "WANDB_ERROR_REPORTING", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"),
    ),
    "Duel": ("DUEL_*",),
}
# sbatch reads these as options, which would override the script's, and srun as describing the job that it is in.
OVERRULING = ("SBATCH_*", "SLURM_*")
# Set by every shell, terminal or desktop and needed by no job: not worth a remark when not passed.
USUAL = (
    *("_", "SHLVL", "OLDPWD", "HOSTNAME", "HOST", "HOSTTYPE", "MACHTYPE", "OSTYPE", "VENDOR", "GROUP", "MAIL", "PS1"),
    *("PROMPT*", "HIST*", "LS_COLORS", "LSCOLORS", "COLORTERM", "TERM_*", "LESS*", "PAGER", "MANPAGER", "EDITOR"),
    *("VISUAL", "DISPLAY", "XAUTHORITY", "XDG_*", "DBUS_*", "SSH_*", "GPG_*", "WINDOWID", "TMUX*", "STY", "WINDOW"),
    *("VSCODE_*", "DESKTOP_SESSION", "SESSION_MANAGER", "SUDO_*", "LINES", "COLUMNS", "CVS_RSH", "S_COLORS", "which_*"),
    *("BASH_FUNC_*", "SQUEUE_*", "SACCT_*", "SINFO_*", "SELINUX_*", "KDEDIRS", "QT*", "GDK_*", "GTK_*", "GIT_*"),
    *("GUESTFISH_*", "DEBUGINFOD_*", "PIP_*", "UV_*", "DEBIAN_FRONTEND", "CI", "CONDA_*", "_CE_*", "PYTEST_*"),
)


@contextlib.contextmanager
def environment(target: Target, passed: Mapping[str, str] | None = None) -> Iterator[list[str]]:
    """Reduce this process's environment, which sbatch inherits, to what ``passes``; yields the names of the rest.

    ``passed``: the target's ``pass_variables`` as another process had them, to be used instead of this one's.
    """
    kept = dict(os.environ)
    left_out = [name for name in kept if not passes(name, target)]
    there = target.pass_variables if passed is not None else []
    for name in (*left_out, *there):
        os.environ.pop(name, None)
    os.environ.update({name: passed[name] for name in there if passed and name in passed})
    try:
        yield left_out
    finally:
        for name in there:
            os.environ.pop(name, None)
        os.environ.update(kept)


def passes(name: str, target: Target) -> bool:
    """Return whether sbatch and the jobs on ``target`` get the variable ``name`` of the calling shell."""
    return name in target.pass_variables or _allowed(name)


@functools.cache  # asked of each variable for each job
def _allowed(name: str) -> bool:
    if name == "SLURM_CONF":
        return True
    if variables.matches(name, OVERRULING) or name in variables.obeyed([name]):
        return False
    return any(variables.matches(name, patterns) for patterns in ALLOWED.values())


def remarks(left_out: list[str], target: Target, name: str, lines: list[str]) -> list[str]:
    """Return remarks on the variables a user would miss among ``left_out``, which sbatch does not get.

    ``target`` is the one called ``name``, as ``for_job`` made it; ``lines`` are the script's directives.
    """
    notes = []
    for variable in left_out:
        option = "--" + variable.removeprefix("SBATCH_").lower().replace("_", "-")
        if variable in ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"):
            if directives.value(lines, option) is None:
                notes.append(
                    f"{variable} is not passed on, and the target has no {option}: add that line, "
                    f"or 'pass_variables: [{variable}]'"
                )
        elif variable == "WANDB_API_KEY":
            notes.append(
                "WANDB_API_KEY is not passed to jobs, where others could read it: "
                "'.venv/driver/bin/python -m wandb login' stores the key"
            )
    if used := _used(left_out, target):
        notes.append(
            f"the target's lines use {', '.join(used)}, which this shell has but jobs do not get: "
            f"'pass_variables: [{', '.join(used)}]' passes what is not secret (cluster.yaml: targets.{name})"
        )
    others = [variable for variable in left_out if _is_of_note(variable) and variable not in used]
    if others:
        count = "1 variable" if len(others) == 1 else f"{len(others)} variables"
        notes.append(
            f"{count} of this shell not passed to the jobs: 'python main.py doctor --target {name}' lists them, "
            f"'pass_variables' in cluster.yaml passes them"
        )
    return notes


def _used(left_out: Iterable[str], target: Target) -> list[str]:
    """Return those of ``left_out`` that the target's lines expand but do not set, or that its --export names."""
    setup = target.setup
    lines = [*setup.submit, *setup.job, *setup.node, *setup.task, target.launcher or "", target.node_launcher]
    for side in target.sides.values():
        lines += [*side.job, *side.task, side.launcher or ""]
    text = "\n".join(lines)
    exported = (directives.value(target.directives, "--export") or "").split(",")
    used = []
    for name in left_out:
        word = re.escape(name)
        expanded = re.search(rf"\$(?:{word}\b|\{{{word}\b)", text) and not re.search(rf"(?<![\w$]){word}=", text)
        if (expanded or name in exported) and not variables.matches(name, (*OVERRULING, "HOSTNAME")):
            used.append(name)
    return used


def _is_of_note(name: str) -> bool:
    """Return whether a user may have set ``name`` for the jobs and no other message mentions it.

    ``duel.launch.submit`` reports the variables that frameworks obey.
    """
    reported = name == "WANDB_API_KEY" or name in variables.obeyed([name])
    return not reported and not variables.matches(name, (*OVERRULING, *variables.LEFT, *USUAL))


def listed(target: Target) -> str:
    """List the variables of this shell that the jobs on ``target`` get, and those they do not."""
    names = sorted(os.environ)
    passed = [name for name in names if passes(name, target)]
    kept_back = [name for name in names if name not in passed]
    return f"passed to the jobs: {', '.join(passed) or 'none'}; kept back: {', '.join(kept_back) or 'none'}"
