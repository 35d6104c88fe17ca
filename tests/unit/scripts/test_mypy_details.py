"""The plugin of mypy: the details of an option that there is not are an error of `make lint`."""

from pathlib import Path

from mypy.api import run

ROOT = Path(__file__).parents[3]
MISSPELT = """
from lmi_vllm.config.settings import ModelSettings, Settings

def shown(settings: Settings, model: ModelSettings) -> None:
    said = settings.model.details
    print(said.quantize, model.details.max_loras.stated, said.get("x"))
    print(said.quantise)
    print(settings.server.details.max_loras)
"""


def test_mypy_knows_the_options(tmp_path: Path) -> None:
    """A misspelt name is found, and an option of other settings."""
    file = tmp_path / "misspelt.py"
    file.write_text(MISSPELT, encoding="utf-8")
    cache = ROOT / ".mypy_cache" / "test_details"  # its own: `make lint` may run beside it
    output, _, _ = run(
        ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache), str(file)]
    )
    found = [line.split(": ", 2)[0:3:2] for line in output.splitlines() if ": error: " in line]
    assert [(Path(place).name, text.split(" of ")[0]) for place, text in found] == [
        ("misspelt.py:7", '"quantise" is no option'),
        ("misspelt.py:8", '"max_loras" is no option'),
    ]
