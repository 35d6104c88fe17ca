"""Defaults that differ from LMI's guides: the guides' value, the present one, and since when.

The releases were read in vLLM's wheels: engine/arg_utils.py and config.py of 0.6.3, 0.7.3, 0.8.0,
0.8.3, 0.8.4 and 0.9.0, config/cache.py of 0.19.1 and 0.20.0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.options.row import EffectWord
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.messages import DEFAULT_ORIGIN


@dataclass(frozen=True, slots=True)
class GuideDefault:
    """What the guides say of an option that is not set, and why it is not so.

    `now` is what vLLM does where its own default leaves that open.
    """

    says: str
    why: str
    now: object = None
    argument: str = ""  # where it has another name than the option

    @property
    def sentence(self) -> str:
        """The note for the option's row in `explain`."""
        return f"LMI's guides say {self.says}; this is {self.why}."


GUIDE_DEFAULTS: Final[Mapping[str, GuideDefault]] = MappingProxyType(
    {
        "gpu_memory_utilization": GuideDefault("0.9", "the default of vLLM 0.20 and later"),
        "enable_prefix_caching": GuideDefault("false", "the default of vLLM 0.8 and later", True),
        "enable_chunked_prefill": GuideDefault(
            "unset, which was off below 32k tokens",
            "the default of vLLM 0.8 and later, for models that can",
            True,
        ),
        "max_rolling_batch_prefill_tokens": GuideDefault(
            "unset, which was max_model_len (older ones say 1088)",
            "what vLLM 0.8 and later choose by the device: 2048, 8192 or 16384",
            "auto",
            "max_num_batched_tokens",
        ),
        "limit_mm_per_prompt": GuideDefault(
            "nothing, and vLLM allowed one of each kind", "the default of vLLM 0.8.4 and later", 999
        ),
        "generation_config": GuideDefault(
            "nothing, and vLLM's own values counted (temperature 1.0, top_p 1.0)",
            "the default of vLLM 0.8 and later: the model's own generation_config.json",
        ),
        "fully_sharded_loras": GuideDefault("true", "vLLM's default, then and now"),
        "dtype": GuideDefault("fp16", "what LMI itself passed: the checkpoint's own format"),
        "max_model_len": GuideDefault(
            "the model's own length", "ours: the longest that fits, with a warning where it is less"
        ),
        "max_rolling_batch_size": GuideDefault(
            "256 (older ones 32, as LMI's asynchronous mode has it)", "the newer guide's"
        ),
        "tensor_parallel_degree": GuideDefault("max (the common page 1)", "the newer guide's"),
        "predict_timeout": GuideDefault("120", "what LMI's image sets"),
        "inference_address": GuideDefault(
            "http://0.0.0.0:8080, which images set", "ours outside of an image"
        ),
    }
)


def note_on_default(setting: Setting) -> str:
    """Return the note on an unset setting; empty where the guides have the same default."""
    differs = None if setting.is_set else GUIDE_DEFAULTS.get(setting.name)
    return "" if differs is None else differs.sentence


def rows_of_defaults(settings: Settings) -> Iterator[Setting]:
    """Yield a row for each of these defaults that is vLLM's and has no other row."""
    known = {setting.name for setting in settings.all_details()}
    arguments = load_release().engine
    for name, default in GUIDE_DEFAULTS.items():
        if name not in known and name not in {other.name for other in settings.others}:
            value = arguments[name].default if default.now is None else default.now
            targets = (default.argument or name,)
            yield Setting(name, value, DEFAULT_ORIGIN, EffectWord.MAPS_TO, targets)
