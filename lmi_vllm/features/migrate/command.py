"""`lmi-vllm migrate`: an existing deployment's configuration, rewritten for this server."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Final

from lmi_vllm.commands.explain import write_answer
from lmi_vllm.config.other_servers.tgi_variables import (
    LAUNCHER,
    TGI_PAIRS,
    TGI_VARIABLES,
    unknown_flags,
    variables_of,
)
from lmi_vllm.config.properties import PropertiesFile, read_properties
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.migrate.carried import carry, report_unread
from lmi_vllm.features.migrate.container_commands import with_values
from lmi_vllm.features.migrate.environment_files import commands_in, flags_in, read_environment
from lmi_vllm.features.migrate.migration import (
    Migration,
    SourceServer,
    Step,
    StepOutcome,
    as_properties,
    as_variables,
    detect_server,
    migrate_lmi,
    migrate_sagemaker_vllm,
    migrate_tgi,
    migrate_vllm,
    report_defaults,
)
from lmi_vllm.translate.configuration import Configuration

AUTO = "auto"
_SUFFIXES: Final = frozenset(
    {".yaml", ".yml", ".json", ".env", ".py", ".ipynb", ".tf", ".js", ".ts", ".sh", ".txt"}
)


def add_arguments(parser: argparse.ArgumentParser, _: Configuration) -> None:
    """Add this command's flags."""
    servers = (AUTO, *(server.value for server in SourceServer))
    parser.add_argument("--from", dest="server", choices=servers, default=AUTO,
                        help="which server the configuration is for")  # fmt: skip
    parser.add_argument("--properties", metavar="FILE", help="a serving.properties")
    about = "variables: lines, JSON, YAML, docker run, Dockerfile, code (default: our own)"
    parser.add_argument("--environment", metavar="FILE", help=about)
    parser.add_argument("--output", metavar="FILE", help="write serving.properties there")
    parser.add_argument(
        "--format",
        choices=("text", "environment", "json"),
        default="text",
        help="serving.properties, variables alone, or both as JSON",
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER,
                        help="flags of `vllm serve`, or of TGI's launcher, after --")  # fmt: skip


def run(
    arguments: argparse.Namespace, environ: Mapping[str, str], configuration: Configuration
) -> int:
    """Print the new configuration and the report; return 2 where something was refused, else 0."""
    if arguments.flags[:1] and (kind := _kind_of(arguments.flags[0])):
        _take_leading_file(kind, arguments, configuration)
    is_given = bool(arguments.environment)
    found = read_environment(arguments.environment) if is_given else {**environ}
    variables = {name: text for name, text in found.items() if text is not None}
    flags, unread = [word for word in arguments.flags if word != "--"], list[str]()
    if is_given and not flags:
        flags, unread = _flags_of_file(arguments.environment, found)
    file = _read_properties(arguments.properties) if arguments.properties else None
    server = _server_of(arguments.server, variables, file, flags)
    migration = _migrate(server, variables, file, flags, configuration)
    settings = migration.read(variables, file).settings
    read = _read_names(migration, variables, settings)
    carry(migration, variables, read, settings, is_given=is_given)
    report_unread(migration, [name for name, text in found.items() if text is None])
    if unread:
        why = "these arguments are not read from the file: give them as migrate -- ARGUMENTS"
        migration.steps.append(Step(StepOutcome.REFUSED, " ".join(unread), why=why))
    elif not migration.has_read:
        return _nothing_read(arguments)
    report_defaults(migration, variables, file)
    if arguments.output:
        _write(Path(arguments.output), as_properties(migration.properties))
    if arguments.format == "environment":
        _refuse_line_breaks(migration)
    formats = {"json": _as_json, "environment": _as_environment, "text": _as_text}
    write_answer(formats[arguments.format](migration))
    return 0 if migration.is_complete else 2


def _flags_of_file(path: str, variables: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """Return the arguments of the file's server, and those that cannot be read from it."""
    commands = commands_in(path)
    if len(commands) == 1:
        return with_values(commands[0], variables)
    return [], [*chain.from_iterable(commands)] or flags_in(path)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError([f"--output {file} cannot be written: {error.strerror}"]) from None


def _server_of(
    asked: str, variables: Mapping[str, str], file: PropertiesFile | None, flags: list[str]
) -> SourceServer:
    """Return the server that the configuration is for."""
    if asked != AUTO:
        return SourceServer(asked)
    if flags[:1] == [LAUNCHER]:
        return SourceServer.TGI
    return detect_server(variables, file, bool(flags))


def _read_names(migration: Migration, variables: Mapping[str, str], settings: Settings) -> set[str]:
    """Return the variables that the migration has read as settings, or named."""
    named = {step.source.partition("=")[0] for step in migration.steps}
    if migration.server is SourceServer.TGI:
        return {*named, *TGI_VARIABLES, *TGI_PAIRS}
    if migration.server is not SourceServer.LMI:
        return {*named, *(name for name in variables if name.startswith("SM_VLLM_"))}
    origins = {setting.origin.name for setting in (*settings.all_details(), *settings.others)}
    kept = migration.configuration.options.variables
    return (origins.difference(kept) | named) - {"SAGEMAKER_BIND_TO_PORT"}


def _nothing_read(arguments: argparse.Namespace) -> int:
    """Say on stderr that there was nothing to migrate; return 2."""
    given = arguments.environment or arguments.properties or "our own environment"
    about = (
        f"nothing to migrate in {given}: NAME=value lines, JSON or YAML with an Environment, "
        "`docker run -e NAME=value`, a Dockerfile's ENV, a Python dict, Terraform and JavaScript "
        "can be read"
    )
    print(f"lmi-vllm: error: {about}", file=sys.stderr)
    return 2


def _kind_of(word: str) -> str:
    """Return the flag that a leading file is for; none for a model, which may be a file too."""
    path = Path(word)
    if path.suffix == ".properties":
        return "--properties"
    is_file = path.suffix in _SUFFIXES or path.name == "Dockerfile"
    return "--environment" if is_file else ""


def _take_leading_file(
    kind: str, arguments: argparse.Namespace, configuration: Configuration
) -> None:
    """Parse a leading file as the value of that flag, and what follows it as flags of `migrate`."""
    file, *rest = arguments.flags
    parser = argparse.ArgumentParser(prog="lmi-vllm migrate")
    add_arguments(parser, configuration)
    parser.parse_args([kind, file, *rest], arguments)


def _migrate(
    server: SourceServer,
    environ: Mapping[str, str],
    file: PropertiesFile | None,
    flags: list[str],
    configuration: Configuration,
) -> Migration:
    """Return the migration from that server."""
    if server is SourceServer.VLLM:
        return migrate_vllm(flags, configuration)
    if server is SourceServer.SAGEMAKER_VLLM:
        return migrate_sagemaker_vllm(environ, configuration)
    if server is SourceServer.TGI:
        return _migrate_launcher(environ, variables_of(flags), configuration)
    return migrate_lmi(environ, file, configuration)


def _migrate_launcher(
    environ: Mapping[str, str], flags: Mapping[str, str], configuration: Configuration
) -> Migration:
    """Return the migration of TGI's variables and flags; flags win."""
    migration = migrate_tgi({**environ, **flags}, configuration)
    for flag in unknown_flags([*flags]):
        migration.steps.append(Step(StepOutcome.REFUSED, flag, why="TGI has no such flag"))
    return migration


def _read_properties(path: str) -> PropertiesFile:
    """Return the parsed file; raises `ConfigurationError` where it cannot be read."""
    try:
        return read_properties(Path(path))
    except OSError as error:
        raise ConfigurationError([f"{path} cannot be read: {error.strerror}"]) from error


def _as_json(migration: Migration) -> str:
    """Return the migration as one JSON object."""
    steps = [
        {"outcome": step.outcome, "source": step.source, "becomes": step.becomes, "why": step.why}
        for step in migration.shown_steps
    ]
    document = {
        "from": migration.server,
        "properties": migration.properties,
        "environment": migration.environment,
        **{str(word): [step for step in steps if step["outcome"] == word] for word in StepOutcome},
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _as_text(migration: Migration) -> str:
    """Return serving.properties, the variables beside it, and the report as comments."""
    lines = [f"# serving.properties, migrated from {migration.server}"]
    lines += _lines(as_properties(migration.properties))
    if migration.environment:
        lines += ["", "# environment variables, to be set beside it:"]
        lines += [f"#   {name}={_quoted(text)}" for name, text in migration.environment.items()]
    return "\n".join([*lines, *_report(migration)])


def _as_environment(migration: Migration) -> str:
    """Return variables as `docker --env-file` takes them, and the report as comments."""
    variables, rest = as_variables(migration)
    lines = [f"# environment, migrated from {migration.server}"]
    lines += [f"{name}={text}" for name, text in variables.items() if not _has_line_break(text)]
    rest |= {key: text for key, text in migration.properties.items() if _has_line_break(text)}
    if rest:
        lines += ["", "# for serving.properties, where alone it can stand:"]
        lines += [f"#   {line}" for line in _lines(as_properties(rest))]
    return "\n".join([*lines, *_report(migration)])


def _refuse_line_breaks(migration: Migration) -> None:
    """Report each value that a file of variables cannot hold: one line is one variable there."""
    for key, text in {**migration.properties, **migration.environment}.items():
        if _has_line_break(text):
            is_option = key in migration.properties
            advice = "write it in serving.properties" if is_option else "set it in another way"
            why = f"a file of variables holds no line break; {advice}"
            migration.steps.append(Step(StepOutcome.REFUSED, key, why=why))


def _has_line_break(text: str) -> bool:
    """Whether properties files and files of variables end a line inside `text`."""
    return "\n" in text or "\r" in text


def _lines(properties: str) -> list[str]:
    """Return the lines of a properties file; unlike for `str`, U+2028 and the like end none."""
    return properties.split("\n")[:-1]


def _quoted(text: str) -> str:
    """Return `text` as a shell reads it, on one line."""
    if not _has_line_break(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{escaped}'".replace("\n", "\\n").replace("\r", "\\r")


def _report(migration: Migration) -> list[str]:
    """Return the lines of the report (mapped, approximated, refused) as comments."""
    lines: list[str] = []
    for outcome in StepOutcome:
        steps = [step for step in migration.shown_steps if step.outcome == outcome]
        if steps:
            lines += ["", f"# {outcome}"]
        for step in steps:
            becomes = f" -> {step.becomes}" if step.becomes else ""
            why = f" ({_reason(step)})" if step.why else ""
            line = f"{step.source}{becomes}{why}"
            lines.append("#   " + "\\n".join(line.splitlines()))  # or the rest were settings
    return lines


def _reason(step: Step) -> str:
    """Return why on one line, without the option and its place, which stand before it."""
    why = " ".join(step.why.split())
    name, _, place = step.source.rpartition(" (")
    label = f"{name.partition('=')[0]} ({place}"
    return why.removeprefix(label).lstrip(": ") if place and why.startswith(label) else why
