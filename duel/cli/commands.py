"""The commands, with options that ``duel.cli`` has checked. Each returns the exit code.

Heavy modules are imported by the command that needs them, so that --help answers at once.
"""

import argparse
import gc
import json
import time
from typing import TYPE_CHECKING

from duel import ROOT, terminal
from duel.catalogue import FRAMEWORKS
from duel.errors import UserError
from duel.options import has_selection
from duel.terminal import say, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from duel.launch.progress import Progress
    from duel.launch.views import Snapshot
    from duel.results import Results, Run

REFRESH_SECONDS = 30  # for a report that follows runs


def submit(args: argparse.Namespace, results: "Results") -> int:
    """Render one script for each benchmark, use case and framework, and start them on the target."""
    from duel.launch import cluster, directives, plan, script
    from duel.table import update

    described = cluster.load(ROOT / "cluster.yaml")
    jobs = plan.jobs(args, described, results)
    if len(args.benchmark) * len(args.use_case) > 1 or len({(job.mode, job.session) for job in jobs}) > 1:
        from duel.launch import campaign

        terminal.show(plan.table(jobs))
        for text in campaign.told(jobs, described, results):
            say(text)
    if args.dry_run:
        target = described.targets[jobs[0].target]
        texts = [script.render(job, target) for job in jobs]
        for path, text, job in zip(script.write(jobs, texts, say), texts, jobs, strict=True):
            terminal.show_file(f"# {path.relative_to(ROOT)}\n{text}\n")
            for warning in directives.warnings(directives.of_script(text), continues=bool(job.dataset)):
                warn(f"warning: {warning}")
        return 0
    from duel.launch import manage, submit

    runs = submit.launch(jobs, described, results, say)
    if not args.wait:
        say("'python main.py status' shows them, 'python main.py compare' compares both sides")
        return 0
    finished = manage.wait(runs, results)
    update(results)
    print_comparison(runs, results)
    return 0 if finished else 1


def compare(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import manage

    print_comparison(manage.to_compare(args, results), results)
    return 0


def explain(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, manage
    from duel.report import explain

    runs = manage.to_compare(args, results)
    terminal.show(*explain.report(runs, results))
    if args.reproduce:
        here = {
            name: {framework: str(getattr(target.python, framework)) for framework in FRAMEWORKS}
            for name, target in cluster.load(ROOT / "cluster.yaml").targets.items()
            if target.scheduler == "local"
        }
        terminal.show("", *explain.reproduce(runs, results, here))
    return 0


def print_comparison(runs: "list[Run]", results: "Results") -> None:
    """Print the comparison: the end of ``--wait``, and all that ``compare`` does."""
    from duel.launch import cluster
    from duel.report import compare

    try:
        default = cluster.load(ROOT / "cluster.yaml").default
    except UserError:  # records can be read without it; commands then name their target
        default = None
    terminal.show(*compare.report(runs, results, default))


def status(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import display, manage, state

    _go_on(results)
    recent = not (args.all or args.json or has_selection(args))

    def chosen(look: "Snapshot") -> "Snapshot":
        look = state.with_verdicts(look, results)
        runs = manage.select(look.runs, args, results)
        return look.only(runs) if len(runs) < len(look.runs) else look

    if args.json:
        look = chosen(state.look(results))
        print(json.dumps([seen.to_json() for seen in look.runs], indent=1))
        for note in look.notes:
            warn(f"not known: {note}")
    elif args.watch:
        manage.watch(results, chosen, recent)
    else:
        terminal.show(display.table(chosen(state.look(results, recent=recent)), args.all))
    return 0


def _go_on(results: "Results") -> None:
    """See to it that what earlier commands left to be sent to Slurm is sent."""
    from duel.launch import intent

    if intent.mine(results) and not intent.sender(results):
        from duel.launch import cluster, sender

        try:
            described = cluster.load(ROOT / "cluster.yaml")
        except UserError:  # runs can be looked at without it
            return
        sender.resume(described, results, warn)


def logs(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import manage

    manage.print_log(results, manage.find(results, args.run), args.follow)
    return 0


def verify(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import manage, verify

    found, good = verify.verify(manage.find(results, args.run), results)
    terminal.show(found)
    return 0 if good else 1


def cancel(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import manage, state
    from duel.table import update

    if not has_selection(args):
        raise UserError("name the runs to cancel, or select them, as in 'main.py cancel --state queued'")
    chosen = manage.select(state.look(results).runs, args, results)
    ended = manage.cancel(results, [seen.run for seen in chosen], say)
    update(results)
    return 0 if ended else 1


def resubmit(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, resubmit

    return resubmit.resubmit(args, cluster.load(ROOT / "cluster.yaml"), results, say)


def study(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import campaign, cluster, progress, study

    if args.budget is not None and args.action in ("status", "report"):
        raise UserError("--budget is for plan, submit and resume")
    _go_on(results)
    described = cluster.load(ROOT / "cluster.yaml")
    found = study.load(study.path(ROOT / "studies", args.study), described, results)
    if args.action == "report":
        return _report_study(args.study, progress.of(found, results), results)
    if args.action == "status":
        terminal.show(campaign.status(found, progress.of(found, results), results))
    else:
        campaign.carry_out(found, args.action, args.budget, described, results, say)
    return 0


def _report_study(name: str, points: "Sequence[Progress]", results: "Results") -> int:
    from duel.report import document, records

    runs = {run_id for one in points for run_id in (one.run_id, *one.counted) if run_id}
    if not runs:
        raise UserError(f"nothing of study {name} is measured yet; 'python main.py study {name} submit' starts it")
    document.write([records.measured(results, runs)], results.folder / "report", say)
    return 0


def data(args: argparse.Namespace, results: "Results") -> int:
    """Show, fetch, prepare or check data sets."""
    from duel.launch import cluster, datasets

    _, target = cluster.load(ROOT / "cluster.yaml").target(args.target)
    place = datasets.place_of(target)
    acts = [name for name in ("download", "prepare", "skip_damaged", "check") if getattr(args, name)]
    if args.dataset is None:
        if acts:
            raise UserError(f"--{acts[0]} needs the name of a data set")
        terminal.show(datasets.table(place))
        return 0
    if args.skip_damaged and not args.prepare:
        raise UserError("--skip_damaged is for --prepare")
    if args.download and not args.prepare:
        datasets.download(args.dataset, place.data, say)
    if args.prepare:
        datasets.prepare(args.dataset, place.data, args.skip_damaged, args.download, say)
    if args.check:
        datasets.check(args.dataset, place, say)
    if not acts:
        terminal.show(*datasets.described(args.dataset, place))
    return 0


def sync(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import manage, sync

    chosen = manage.to_upload(args, results)
    if not chosen:
        say("nothing to upload: no runs of yours yet")
    return 0 if sync.sync(chosen, say) else 1


def collect(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import state
    from duel.table import update

    _go_on(results)
    for note in state.look(results, recent=True).notes:  # runs that ended without a report are settled first
        warn(f"not known: {note}")
    counts = update(results).states
    summary = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no rows yet"
    say(f"{results.csv.relative_to(ROOT)}: {sum(counts.values())} rows ({summary})")
    if not args.check:
        return 0
    from duel.launch import verify

    found = verify.check(results)
    for line in found or ["checked: every row is as its run's folder has it"]:
        (warn if found else say)(line)
    return 1 if found else 0


def archive(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import archive, manage, state

    look = state.look(results)
    archive.archive(manage.select(look.runs, args, results), look.runs, results, say)
    return 0


def validate(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, validate

    described = cluster.load(ROOT / "cluster.yaml")
    asked = (args.benchmark, args.size, args.weights, args.target)
    return 0 if validate.validate(*asked, described, results, say) else 1


def publish(args: argparse.Namespace, results: "Results") -> int:
    from duel.report import published

    published.publish(args.name, results, say)
    return 0


def report(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import state
    from duel.report import against, document, records

    if args.live and args.name:
        raise UserError("--live follows runs and excludes --name")
    if not args.live:
        gc.disable()  # it would walk again and again through a hundred thousand rows, which have no cycles
    sets = [records.published(results, name) for name in args.name] or [records.measured(results)]
    if args.against:
        if len(sets) > 1:
            raise UserError("--against compares one set with another: give a single --name")
        before = against.earlier(results, args.against, sets[0].name)
        changes, left_out = against.changes(before, sets[0])
        terminal.show(against.table(changes, left_out, args.against))
        return 2 if not changes else 1 if against.is_slower(changes) else 0
    folder = (sets[0].folder if len(sets) == 1 else results.folder) / "report"
    if not args.live:
        document.write(sets, folder, say)
        return 0
    while True:
        running = [seen for seen in state.look(results).runs if not seen.ended]
        now = records.measured(results)
        document.write([now], folder, say, refresh=REFRESH_SECONDS if running else None)
        if not running:
            return 0
        time.sleep(REFRESH_SECONDS)


def reproduce(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, reproduce
    from duel.report import records

    found = records.published(results, args.set)
    chosen = reproduce.points(found, args.point, args.target)
    reproduce.show(found, chosen)
    if args.dry_run:
        return 0
    return reproduce.reproduce(chosen, cluster.load(ROOT / "cluster.yaml"), results, say)


def bundle(args: argparse.Namespace, results: "Results") -> int:
    from duel.report import bundle, records

    bundle.write(records.published(results, args.set), results.folder / "bundles", say)
    return 0


def workspace(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import workspace

    say(workspace.save(args.entity, args.project))
    return 0


def init(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import init, working_script

    if args.script is None:
        return init.init(ROOT / "cluster.yaml", say)
    working_script.target(args.script, say)
    return 0


def doctor(args: argparse.Namespace, results: "Results") -> int:
    from duel.launch import cluster, doctor, thorough

    described = cluster.load(ROOT / "cluster.yaml")
    if args.thorough:
        return thorough.check(described, args.target, results, say)
    if args.target is None:
        return doctor.run(described, results)
    return doctor.prove(described, args.target, results, say)
