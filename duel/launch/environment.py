"""Which variables of the calling shell reach sbatch, and with it the job.

Slurm hands a job all of sbatch's environment, and sites may store it where others can read it. What is secret cannot be
told by a name (MY_PAT, PGPASS), so only what is listed here goes in, and what the target names in ``pass_variables``.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from duel import variables
from duel.launch import directives
from duel.launch.schema import Target

# Patterns of fnmatch, by who needs them.
ALLOWED = {
    "shells": ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "PWD"),
    "Slurm": ("SLURM_CONF", "KRB5CCNAME", "KRB5_CONFIG"),
    # BASH_ENV and exported functions are how a script that is no login shell knows the word 'module'.
    "modules": (
        *("MODULE*", "LOADEDMODULES", "_LMFILES_*", "LMOD_*", "_LMOD_*", "__LMOD_*", "__MODULES_*", "_ModuleTable*"),
        *("BASH_ENV", "BASH_FUNC_module*", "BASH_FUNC_ml%%", "BASH_FUNC__module*", "BASH_FUNC_switchml*"),
        *("EBROOT*", "EBVERSION*", "EBDEVEL*", "PE_*", "CRAY*"),
    ),
    # What modules, Conda and a site's own profile set are folders, and end so: SCRATCH_DIR, OPAL_PREFIX, CUDA_HOME.
    "folders": ("*_HOME", "*_ROOT", "*_DIR", "*_PATH", "*_PREFIX", "LIBRARY_PATH", "CPATH", "MANPATH", "INFOPATH"),
    "file systems": ("SCRATCH", "PSCRATCH", "WORK", "PROJECT", "STORE", "CFS"),
    "Python": ("PYTHON*", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_SHLVL", "CONDA_PYTHON_EXE"),
    "network": (
        *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    ),
    # docs.wandb.ai/guides/track/environment-variables; where a key is, and never the key
    "Weights & Biases": (
        *("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_BASE_URL", "WANDB_HOST", "WANDB_TAGS", "WANDB_NOTES"),
        *("WANDB_DISABLE_GIT", "WANDB__DISABLE_*", "WANDB__SAVE_REQUIREMENTS", "WANDB_SILENT", "WANDB_CONSOLE"),
        *("WANDB_HTTP_TIMEOUT", "WANDB_INIT_TIMEOUT", "WANDB_ERROR_REPORTING", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"),
    ),
    "Duel": ("DUEL_*",),
}
# sbatch takes these for options, which would overrule the script's own, and srun for the job that it is in.
OVERRULING = ("SBATCH_*", "SLURM_*")
# What every shell, terminal and desktop has and no job needs: not worth a word where it stays behind.
USUAL = (
    *("_", "SHLVL", "OLDPWD", "HOSTNAME", "HOST", "HOSTTYPE", "MACHTYPE", "OSTYPE", "VENDOR", "GROUP", "MAIL", "PS1"),
    *("PROMPT*", "HIST*", "LS_COLORS", "LSCOLORS", "COLORTERM", "TERM_*", "LESS*", "PAGER", "MANPAGER", "EDITOR"),
    *("VISUAL", "DISPLAY", "XAUTHORITY", "XDG_*", "DBUS_*", "SSH_*", "GPG_*", "WINDOWID", "TMUX*", "STY", "WINDOW"),
    *("VSCODE_*", "DESKTOP_SESSION", "SESSION_MANAGER", "SUDO_*", "LINES", "COLUMNS", "CVS_RSH", "S_COLORS", "which_*"),
    *("BASH_FUNC_*", "SQUEUE_*", "SACCT_*", "SINFO_*", "SELINUX_*", "KDEDIRS", "QT*", "GDK_*", "GTK_*", "GIT_*"),
    *("GUESTFISH_*", "DEBUGINFOD_*", "PIP_*", "UV_*", "DEBIAN_FRONTEND", "CI", "CONDA_*", "_CE_*", "PYTEST_*"),
)


@contextlib.contextmanager
def environment(target: Target) -> Iterator[list[str]]:
    """Leave in this process's environment, which sbatch gets, only what ``passes``; yields the names of the rest."""
    kept = dict(os.environ)
    left_out = [name for name in kept if not passes(name, target)]
    for name in left_out:
        del os.environ[name]
    try:
        yield left_out
    finally:
        os.environ.update(kept)


def passes(name: str, target: Target) -> bool:
    """Whether sbatch and the jobs on ``target`` get the variable ``name`` of the calling shell."""
    if name in target.pass_variables or name == "SLURM_CONF":
        return True
    if variables.matches(name, OVERRULING) or name in variables.obeyed([name]):
        return False
    return any(variables.matches(name, patterns) for patterns in ALLOWED.values())


def remarks(left_out: list[str], target: Target, name: str, lines: list[str]) -> list[str]:
    """What a user would miss of the variables ``left_out``, which sbatch does not get.

    ``target`` is the one called ``name``, as ``for_job`` made it; ``lines`` are the script's directives.
    """
    said = []
    for variable in left_out:
        option = "--" + variable.removeprefix("SBATCH_").lower().replace("_", "-")
        if variable in ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"):
            if directives.value(lines, option) is None:
                said.append(
                    f"{variable} is not passed on, and the target has no {option}: add that line, "
                    f"or 'pass_variables: [{variable}]'"
                )
        elif variable == "WANDB_API_KEY":
            said.append("WANDB_API_KEY is not passed to jobs, others could read it there: 'wandb login' stores the key")
    if used := _used(left_out, target):
        said.append(
            f"the target's lines use {', '.join(used)}, which this shell has and jobs do not get: "
            f"'pass_variables: [{', '.join(used)}]' passes what is no secret (cluster.yaml: targets.{name})"
        )
    others = [variable for variable in left_out if _is_of_note(variable) and variable not in used]
    if others:
        count = "1 variable" if len(others) == 1 else f"{len(others)} variables"
        said.append(
            f"{count} of this shell not passed to the jobs: 'python main.py doctor --target {name}' lists them, "
            f"'pass_variables' in cluster.yaml passes them"
        )
    return said


def _used(left_out: Iterable[str], target: Target) -> list[str]:
    """Those of ``left_out`` that the target's lines expand, and none sets, or that its --export asks sbatch for."""
    setup = target.setup
    text = "\n".join([*setup.submit, *setup.job, *setup.node, *setup.task, target.launcher or "", target.node_launcher])
    exported = (directives.value(target.directives, "--export") or "").split(",")
    used = []
    for name in left_out:
        word = re.escape(name)
        expanded = re.search(rf"\$(?:{word}\b|\{{{word}\b)", text) and not re.search(rf"(?<![\w$]){word}=", text)
        if (expanded or name in exported) and not variables.matches(name, (*OVERRULING, "HOSTNAME")):
            used.append(name)
    return used


def _is_of_note(name: str) -> bool:
    """Whether a user may have set ``name`` for what runs, and is not told of it elsewhere.

    Of what frameworks obey, ``duel.launch.submit`` tells.
    """
    told = name == "WANDB_API_KEY" or name in variables.obeyed([name])
    return not told and not variables.matches(name, (*OVERRULING, *variables.LEFT, *USUAL))


def listed(target: Target) -> str:
    """Which variables of this shell the jobs on ``target`` get, and which they do not."""
    names = sorted(os.environ)
    passed = [name for name in names if passes(name, target)]
    kept_back = [name for name in names if name not in passed]
    return f"passed to the jobs: {', '.join(passed) or 'none'}; kept back: {', '.join(kept_back) or 'none'}"
