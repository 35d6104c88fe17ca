"""The entry points of TGI's and LMI's images: the same words start this server.

TGI's image takes the flags of its launcher, most often without the launcher's name. Its flags are
variables, too, and become those; the address is one of our flags, for `health` to see it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.config.other_servers.tgi_variables import (
    LAUNCHED,
    LAUNCHER,
    pair_replacements,
    unknown_flags,
    variables_of,
)
from lmi_vllm.config.other_servers.vllm_flags import problem_of_word, read_flags
from lmi_vllm.errors import ConfigurationError

_LAUNCHERS: Final = (LAUNCHER, "tgi-entrypoint.sh")
_OF_LMI: Final = ("dockerd-entrypoint.sh", "djl-serving")
_IMAGE_PORT: Final = "80"  # of TGI's image, which sets PORT


def as_ours(words: list[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment of `serve` for such a command; others as they are.

    Raises:
        ConfigurationError: the launcher does not have a flag.
    """
    if Path(words[0]).name in _OF_LMI:
        rest = words[1:]
        words = rest if rest[:1] == ["serve"] else ["serve", *rest]
    flags = _launcher_flags(words)
    if flags is None:
        return words, {**environ}
    if wrong := [*filter(None, map(problem_of_word, flags))]:
        raise ConfigurationError(wrong)
    if unknown := unknown_flags([*variables_of(flags)]):
        raise ConfigurationError([f"{', '.join(unknown)}: TGI's launcher has no such flag"])
    return _as_serve(flags, environ)


def _launcher_flags(words: Sequence[str]) -> list[str] | None:
    """Return the flags of TGI's launcher; None for another command.

    Without the launcher's name they are its flags where one of them is not vLLM's.
    """
    if Path(words[0]).name in _LAUNCHERS:
        return [*words[1:]]
    if not words[0].startswith("-"):
        return None
    is_tgis = not unknown_flags([*variables_of(words)])
    return [*words] if is_tgis and any(flag.is_unknown for flag in read_flags(words)) else None


def _as_serve(flags: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    variables = variables_of(flags)
    given = {"PORT": _IMAGE_PORT, **environ, **variables}
    _, address = next(pair_replacements(given))
    host, _, port = address.text.removeprefix("http://").rpartition(":")
    # The launcher has the model from MODEL_ID alone.
    kept = {name: text for name, text in environ.items() if name not in ("HF_MODEL_ID", "PORT")}
    variables.pop("PORT", None)
    whole = {**kept, **variables, LAUNCHED: "1"}
    return ["serve", "--host", host, "--port", port], whole
