"""The option table of a server: rows of the core and of features, found by any of their names."""

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.options import (
    ALIAS_VARIABLES,
    ENVIRONMENT_SETTINGS,
    OPTIONS,
    SERVER_SETTINGS,
)
from lmi_vllm.config.options.row import ENV, FILE, Option, Rows
from lmi_vllm.config.setting import FILE_PREFIX
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.config.variable_names import (
    ARGUMENT_PREFIX,
    OPTION_PREFIX,
    OWN_PREFIX,
    PREFIXES,
    SAGEMAKER_PREFIX,
    SERVING_PREFIX,
    bare_name,
    closest,
    option_key,
)
from lmi_vllm.config.vllm_schema import load_release

_KUBERNETES: Final = re.compile(
    r"(SERVING|LMI|OPTION)(_[A-Z0-9_]+)?"
    r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_KUBERNETES_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")
_KUBERNETES_URL: Final = re.compile(r"(?<!_SERVICE)_PORT$")  # always such a value
# Names of other servers and of older releases, and what means the same here.
_MEANT: Final = MappingProxyType(
    {
        "api_key": "LMI_API_KEY",
        "port": "SERVING_INFERENCE_ADDRESS=http://0.0.0.0:<port>, or use --port",
        "s3url": "option.model_id=s3://…",
        "model_url": "option.model_id",
    }
)


class OptionTable:
    """Every option, server setting and variable; `kinds` are the settings of features."""

    def __init__(self, kinds: Sequence[type[FeatureSettings]]) -> None:
        self.kinds = tuple(kinds)
        brought = (row for kind in kinds for row in kind.rows)
        self.rows = Rows.of((*OPTIONS, *SERVER_SETTINGS, *ENVIRONMENT_SETTINGS, *brought))
        self.variables = tuple(row.name for row in self.rows.variables)  # those read whole

    def argument_key(self, variable: str) -> str:
        """The key, without a prefix, of an `ARGS_*` variable: an argument of LMI's translators."""
        suffix = variable.removeprefix(ARGUMENT_PREFIX).lower()
        return next((row.name for row in self.rows.server if row.name.lower() == suffix), suffix)

    def is_kubernetes_made(self, variable: str, text: str) -> bool:
        """Whether Kubernetes set `variable` for a Service whose name begins like our prefix."""
        if _KUBERNETES_VALUE.match(text):
            return _KUBERNETES.fullmatch(variable) is not None
        if variable.startswith(OPTION_PREFIX) and self.is_known(option_key(variable)[7:]):
            return False  # OPTION_MASTER_PORT is an engine argument
        if _KUBERNETES_URL.search(variable) and not re.search(r"_\d+_[A-Z]+_PORT$", variable):
            return False  # SERVING_PORT=8080 is set by hand
        return _KUBERNETES.fullmatch(variable) is not None

    def find(self, name: str) -> Option | None:
        """The row of option `name` (without prefix), by either of its names."""
        return next(
            (row for row in self.rows.options if name == row.name or name in row.aliases), None
        )

    def is_known(self, name: str) -> bool:
        """Whether `name` is in the table or is an argument of vLLM."""
        release = load_release()
        return self.find(name) is not None or name in release.passed or name in release.front_end

    def names(self) -> tuple[str, ...]:
        """Every name that may follow `option.`."""
        release = load_release()
        table = [name for row in self.rows.options for name in (row.name, *row.aliases)]
        server = [
            alias.removeprefix(FILE_PREFIX) for row in self.rows.server for alias in row.aliases
        ]
        return tuple(dict.fromkeys([*table, *server, *release.passed, *release.front_end]))

    def file_suggestions(self, key: str) -> str:
        """A clause with similar names for an unknown key of serving.properties."""
        if key.lower().startswith(FILE_PREFIX):
            names = [f"{FILE_PREFIX}{name}" for name in self.names()]
            names += [row.name for row in self.rows.server if row.written]
            same = next((name for name in names if name.lower() == key.lower()), None)
            return f"write {same}" if same else self._elsewhere(key) or closest(key, names)
        if key.startswith(OPTION_PREFIX):
            return self.file_suggestions(option_key(key))
        if self.is_known(key):
            return f"write {FILE_PREFIX}{key}"
        names = [row.name for row in self.rows.server if FILE in row.written]
        names += [f"{FILE_PREFIX}{name}" for name in self.names()]
        return self._elsewhere(key) or closest(key, names)

    def variable_suggestions(self, variable: str) -> str:
        """A clause with similar names for an unknown variable of a prefix, or of `known` ones."""
        if variable.startswith(OPTION_PREFIX):
            names = [OPTION_PREFIX + _suffix(name) for name in self.names()]
            names += [SERVING_PREFIX + row.name.upper() for row in self.rows.server if row.written]
        elif variable.startswith(ARGUMENT_PREFIX):
            rows = (row for row in self.rows.server if row.written == (FILE,))
            names = [ARGUMENT_PREFIX + row.name.upper() for row in rows]
        elif variable.startswith(SERVING_PREFIX):
            names = [f"{SERVING_PREFIX}{row.name.upper()}" for row in self.serving_rows()]
        else:
            names = [name for name in self.variables if name.startswith(OWN_PREFIX)]
        same = next((name for name in names if name.lower() == variable.lower()), None)
        return f"write {same}" if same else self._elsewhere(variable) or closest(variable, names)

    def _elsewhere(self, name: str) -> str:
        """The clause for a name that is known with another prefix; "" if it is not."""
        bare = bare_name(name)
        if (hint := _MEANT.get(bare)) is not None:
            return f"write {hint}"
        if bare == "engine":
            return f"write {OPTION_PREFIX}ENGINE"
        for row in self.serving_rows():
            if bare == row.name.lower():
                return f"write {SERVING_PREFIX}{row.name.upper()}"
        option = next((each for each in self.names() if each.lower() == bare), None)
        if option is not None:
            return f"write {OPTION_PREFIX}{_suffix(option)}"
        own = f"{OWN_PREFIX}{bare.upper()}"
        return f"write {own}" if own in self.variables else ""

    def serving_rows(self) -> tuple[Option, ...]:
        """The server settings that can be written `SERVING_<NAME>`."""
        return tuple(row for row in self.rows.server if ENV in row.written)

    def case_hint(self, variable: str) -> str | None:
        """The right name of a variable in the wrong case."""
        upper = variable.upper()
        if upper.startswith(SAGEMAKER_PREFIX) and not variable.startswith(SAGEMAKER_PREFIX):
            return upper  # of vLLM's images; whether it is known is said once it is read
        if variable == upper or not upper.startswith(PREFIXES):
            return None
        if variable.startswith(PREFIXES):
            return None  # the prefix is right, so the name itself is wrong
        known = {*self.variables, *(row.source for row in ALIAS_VARIABLES)}
        known |= {f"{SERVING_PREFIX}{row.name.upper()}" for row in self.serving_rows()}
        known |= {OPTION_PREFIX + _suffix(name).upper() for name in self.names()}
        return upper if upper in known else None


def _suffix(name: str) -> str:
    """The part after `OPTION_` for option `name`, in upper case if that is read as the same."""
    return name if name != name.lower() and name != "entryPoint" else name.upper()
