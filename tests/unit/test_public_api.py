import copy
import subprocess
import sys
from dataclasses import replace

import pytest

import lmi_vllm

HEAVY = ("vllm", "torch", "aiohttp", "pydantic", "boto3", "huggingface_hub")


@pytest.mark.parametrize("name", lmi_vllm.__all__)
def test_public_api_every_name_is_there(name: str) -> None:
    """What `__all__` promises can be imported."""
    assert getattr(lmi_vllm, name) is not None


def test_public_api_unknown_name_is_attribute_error() -> None:
    """A name we do not have fails as in any module."""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lmi_vllm.nonsense


def test_public_api_dir_lists_only_public_names() -> None:
    """`dir` shows the interface and nothing of how it is loaded."""
    assert dir(lmi_vllm) == sorted(lmi_vllm.__all__)


def test_public_api_import_is_cheap() -> None:
    """`import lmi_vllm` loads none of the heavy libraries, and the whole of it no vLLM."""
    code = (
        "import sys, lmi_vllm\n"
        f"heavy = [n for n in {HEAVY} if n in sys.modules]\n"
        "[getattr(lmi_vllm, name) for name in lmi_vllm.__all__]\n"
        "print(heavy, 'vllm' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False False\n"


def test_public_api_settings_are_made_and_copied() -> None:
    """Defaults need no argument; a copy of what cannot change is the thing itself."""
    assert lmi_vllm.Settings().model.dtype == "auto"
    settings = lmi_vllm.load_settings({"OPTION_DTYPE": "fp16", "OPTION_ENV": "A=1"})
    assert copy.deepcopy(settings) is settings
    assert settings.model.model_copy(deep=True).dtype == settings.model.dtype
    assert copy.deepcopy(replace(settings, warnings=()).model).env == settings.model.env
