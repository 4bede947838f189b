"""The command line: arguments in, one clear message out, no logic of its own.

Exit codes: 0, 1 for a failure, 2 for bad input (nothing was started), 130 for Ctrl-C, 143 for SIGTERM. Heavy packages are
imported by the commands that need them, so that `--help` and a typo answer at once.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from podium import __version__
from podium.cli.exit_codes import BAD_INPUT, FAILED
from podium.cli.signals import exit_code, in_words, raise_on_sigterm
from podium.cli.terminal import accept_all_characters
from podium.errors import ConfigError, PodiumError, TaskError

if TYPE_CHECKING:
    from podium.config import RunConfig
    from podium.parts import Sources


class _Commands(TyperGroup):
    """Prints a line when Ctrl-C or SIGTERM ends a command; a run that trains prints its own (`training.start`)."""

    def invoke(self, ctx: Any) -> object:
        try:
            raise_on_sigterm()  # not before: typer answers an interrupt of its own parsing with exit code 1
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            typer.echo(f"{in_words(interrupt)}; no run was started or changed", err=True)
            raise typer.Exit(exit_code(interrupt)) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""A full or read-only disk, which is not a fault of the program."""

EXIT_LIMIT_S = 10.0
"""How long the interpreter's exit may take where a tracker was left behind."""
TRACKER_THREAD = "tracker-"
"""First letters of the names of trackers' threads, as in `podium.observability`."""

OPTIONS = frozenset({"--help", "--version", "--dry-run", "--resume", "--recipe", "--json"})
"""All that begins with dashes; what else does may be meant as a setting (`_refuse_dashes`)."""

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, with dotted keys.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"podium {__version__}")
        raise typer.Exit


@app.callback()
def podium(
    is_version_asked: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Podium: RL post-training of language models, conducted by one program."""


@app.command()
def train(
    source: Annotated[str | None, typer.Argument(metavar="RECIPE_OR_YAML", help="A recipe's name, or a YAML file.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the arithmetic, start nothing.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on with a run directory, from its last checkpoint; KEY=VALUE changes its settings."),
    ] = None,
) -> None:
    """Train a model: a recipe or YAML file with overrides, or what is left of a run."""
    if resume is not None:
        changes = [text for text in (source, *(overrides or [])) if text is not None]
        if source is not None and "=" not in source:
            raise ConfigError(f"a resumed run has its own settings: --resume RUN takes KEY=VALUE, and no recipe ({source})")
        require_run(resume, "")
        from podium.cli import training

        training.resume(resume, changes, dry_run=dry_run)
    elif source is None:
        raise ConfigError(
            "say what to train: podium train RECIPE_OR_YAML, or podium train --resume RUN; `podium recipes` lists recipes"
        )
    else:
        config = read_source(source, overrides or [])
        from podium.cli import training

        training.start(config, dry_run=dry_run)


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run directory, or with --recipe a model folder.")],
    recipe: Annotated[str | None, typer.Option(help="The recipe or YAML whose task a bare model is tried on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Score a trained model on its task's held-out problems, greedy and sampled."""
    config = read_source(recipe, [], is_trained=False) if recipe else None
    if config is None:
        require_run(run, f"; for a bare model say which task: podium eval {run} --recipe NAME")
    from podium.cli import training

    scores, config = training.evaluate(run, config)
    if as_json:
        typer.echo(json.dumps(asdict(scores), allow_nan=False))
    else:
        unit, form = training.unit_of(config)
        greedy, sampled = form.format(scores.greedy_score), form.format(scores.sampled_score)
        typer.echo(f"held-out, {scores.n} problems: {unit} {greedy} greedy, {sampled} sampled")


@app.command()
def recipes() -> None:
    """List the recipes: what each shows and how long it takes."""
    from podium.recipes import RECIPES

    for name, build in RECIPES.items():
        typer.echo(f"{name}\n    {build().description}")


@app.command()
def explain(
    source: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_YAML_OR_RUN", help="A recipe's name, a YAML file, or a run directory.")
    ],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Of a run: one JSON object on standard output.")] = False,
) -> None:
    """Print a run's arithmetic and all its settings, as a YAML file; of a run directory, the bytes that its last step moved."""
    from podium.config import explain as explain_config
    from podium.config import to_yaml
    from podium.parts import read_sources

    if _is_folder(source):
        require_run(Path(source), "")
        config = read_source(str(Path(source) / "config.yaml"), overrides or [], sources=read_sources(Path(source) / "parts"))
        from podium.cli import explaining

        explaining.explain_run(Path(source), explain_config(config), as_json=as_json)
        return
    if as_json:
        raise ConfigError(f"--json is for a run directory, which {source} is not; runs are folders such as runs/latest")
    config = read_source(source, overrides or [])
    comments = "\n".join(f"# {line}" for line in explain_config(config))  # so that the output is a YAML file
    typer.echo(f"{comments}\n\n{to_yaml(config)}", nl=False)


def _is_folder(source: str) -> bool:
    """Whether a run is meant: a folder, unless a recipe is called so."""
    from podium.recipes import RECIPES

    return source not in RECIPES and Path(source).is_dir()


def read_source(source: str, overrides: list[str], *, is_trained: bool = True, sources: Sources | None = None) -> RunConfig:
    """The checked config of a recipe's name or a YAML file; `sources` are the files of parts that a run has stored."""
    from podium.config import check, read_yaml, resolve
    from podium.recipes import recipe

    is_file = source.endswith((".yaml", ".yml")) or os.sep in source
    config = resolve(read_yaml(Path(source)) if is_file else recipe(source), overrides, sources=sources)
    check(config, is_trained=is_trained)
    return config


def require_run(path: Path, hint: str) -> None:
    """ConfigError when a path is not a run directory."""
    if not path.is_dir():
        raise ConfigError(f"no run directory {path}; runs are folders such as runs/latest")
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is not a run directory: it has no config.yaml{hint}")


def log_to_stderr() -> None:
    """Warnings go to stderr. Podium's own do so once, whatever a library does to the root logger's handlers and level."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    ours = logging.getLogger("podium")
    ours.setLevel(logging.WARNING)
    ours.addHandler(logging.getLogger().handlers[0])
    ours.propagate = False


def main() -> None:
    """Entry point of `podium`."""
    accept_all_characters()
    log_to_stderr()
    try:
        _run()
    except SystemExit as done:
        _limit_exit(done.code if isinstance(done.code, int) else FAILED if done.code else 0)
        raise


def _limit_exit(code: int) -> None:
    """End the process after EXIT_LIMIT_S where a tracker was left behind: its library may wait at the interpreter's exit."""
    if any(thread.name.startswith(TRACKER_THREAD) for thread in threading.enumerate()):
        sys.stdout.flush()
        limit = threading.Timer(EXIT_LIMIT_S, os._exit, (code,))
        limit.daemon = True
        limit.start()


def _run() -> None:
    try:
        _refuse_dashes(sys.argv[1:])
        app()
    except (ConfigError, TaskError) as exc:
        _fail(f"error: {exc}", BAD_INPUT)
    except PodiumError as exc:
        _fail("\n".join([f"failed: {exc}", *getattr(exc, "__notes__", [])]), FAILED)
    except OSError as exc:
        if exc.errno not in DISK_ERRORS:
            raise
        _fail("\n".join([f"failed: the disk is full or read-only: {exc}; make room", *getattr(exc, "__notes__", [])]), FAILED)


def _refuse_dashes(arguments: list[str]) -> None:
    """ConfigError for a setting that is written like an option."""
    dashed = [text for text in arguments if text.startswith("--") and text.partition("=")[0] not in OPTIONS]
    if not dashed or arguments[0] not in ("train", "explain"):
        return
    from podium.config import settings_called

    for text in dashed:
        key, equals, value = text.removeprefix("--").partition("=")
        found = settings_called(key.replace("-", "_").rpartition(".")[2])
        if key in found:
            found = [key]
        if found:
            after = arguments[arguments.index(text) + 1 :][:1]
            given = value if equals else "".join(after) or "VALUE"
            written = " or ".join(f"{path}={given}" for path in found)
            raise ConfigError(f"{text} is not an option; settings are written without dashes: {written}")


def _fail(message: str, code: int) -> None:
    typer.echo(message, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
