"""Reports each unknown name once, with similar names."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.options.row import CONFIG, ENV, FILE, EffectWord
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.secrets import MASK, is_secret, mask_text
from lmi_vllm.config.setting import FILE_PREFIX, Layers, RawValue, Report, Setting
from lmi_vllm.config.variable_names import OWN_PREFIX, closest
from lmi_vllm.config.whole_variables import is_whole
from lmi_vllm.messages import Origin, OriginKind

# Variables of `make` and the tests, which `make serve` passes on.
_OF_MAKE: Final = ("LMI_VLLM_", "LMI_TEST_")


@dataclass(frozen=True, slots=True)
class UnknownNames:
    """Finds the names that are neither in the option table nor arguments of vLLM.

    `used` are the model's keys with a meaning.
    """

    table: OptionTable
    environ: Mapping[str, str]
    model: Layers
    server: Layers
    config: PropertiesFile | None
    used: Collection[str]
    report: Report
    is_strict: bool

    def collect(self) -> tuple[Setting, ...]:
        """Report all of them; return each as a setting without effect."""
        return (
            *self._model_keys(), *self._server_variables(), *self._config_keys(),
            *self._own_variables(),
        )  # fmt: skip

    def _model_keys(self) -> Iterator[Setting]:
        """Unknown keys of serving.properties and unknown `OPTION_*`."""
        for key, raw in self.model.winners.items():
            if key in self.used:
                continue
            if raw.origin.kind is OriginKind.VARIABLE:
                yield self._unknown_variable(raw)
            else:
                reason = f"is not known and has no effect; {self.table.file_suggestions(key)}"
                yield self._unknown(raw, f"{key} ({raw.origin}) {reason}")

    def _server_variables(self) -> Iterator[Setting]:
        """Unknown `SERVING_*`."""
        known = {row.name for row in self.table.rows.server if ENV in row.written}
        for key, raw in self.server.winners.items():
            is_known = key in known or is_whole(key)
            if not is_known and raw.origin.kind is OriginKind.VARIABLE:
                yield self._unknown_variable(raw)

    def _config_keys(self) -> Iterator[Setting]:
        """Keys of config.properties without effect there."""
        config = self.config
        if config is None:
            return
        rows = {row.name: row for row in self.table.rows.server}
        for key, entry in config.by_key().items():
            row = rows.get(key)
            origin = config.origin(entry)
            if row is None or row.written == (FILE,):
                names = [name for name in rows if CONFIG in rows[name].written]
                sentence = f"{key} ({origin}) is not known and has no effect; {closest(key, names)}"
                yield self._unknown(RawValue(key, entry.value, origin), sentence)
            elif CONFIG not in row.written:
                self.report.warn(f"{key} ({origin}) has no effect there: set SERVING_{key.upper()}")

    def _own_variables(self) -> Iterator[Setting]:
        """Unknown `LMI_*`, and known variables in the wrong case."""
        for name, text in self.environ.items():
            raw = RawValue(name, text, Origin(OriginKind.VARIABLE, name))
            hint = self.table.case_hint(name)
            if hint is not None:
                sentence = f"{name} has no effect: names are case-sensitive, write {hint}"
                yield self._unknown(raw, sentence)
                continue
            is_ours = name.startswith(OWN_PREFIX) and not name.startswith(_OF_MAKE)
            is_ours = is_ours and not self.table.is_kubernetes_made(name, text)
            if is_ours and name not in self.table.variables:
                yield self._unknown_variable(raw)

    def _unknown_variable(self, raw: RawValue) -> Setting:
        """An unknown variable, or one for what is read from serving.properties alone."""
        name = raw.key.removeprefix(FILE_PREFIX)
        advice = self.table.variable_suggestions(raw.origin.name)
        of_file = {row.name for row in self.table.rows.server if row.written == (FILE,)}
        if name in of_file and not advice.startswith("write "):
            advice = f"write {name} into serving.properties, without a prefix"
        return self._unknown(raw, f"{raw.origin} is not known and has no effect; {advice}")

    def _unknown(self, raw: RawValue, sentence: str) -> Setting:
        """One unknown name: a warning, in strict mode an error."""
        (self.report.fail if self.is_strict else self.report.warn)(sentence)
        name = raw.key.removeprefix(FILE_PREFIX)
        text = MASK if is_secret(raw.origin.name) else mask_text(name, raw.text)
        return Setting(name, text, raw.origin, EffectWord.UNKNOWN, (), sentence, raw.key)
