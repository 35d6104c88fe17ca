"""Every name without effect says why, in one line; without this extra it is unknown."""

import pytest

from lmi_vllm.config.options import EffectWord, Option, Rows
from lmi_vllm.config.settings import load_settings
from lmi_vllm.extras.retired_options.options import (
    DroppedArguments,
    ForeignOptions,
    JavaServerKeys,
)
from tests.unit.config.test_option_tables import Row, check_row
from tests.unit.conftest import ExplainRun

ROWS = Rows.of((*ForeignOptions.rows, *DroppedArguments.rows, *JavaServerKeys.rows))


@pytest.mark.parametrize("row", ROWS.options, ids=lambda row: row.name)
def test_option_is_warned_with_its_reason(row: Option) -> None:
    """As an option, once."""
    (warning,) = load_settings({f"OPTION_{row.name.upper()}": "7"}).warnings
    assert warning == f"option.{row.name} (OPTION_{row.name.upper()}) has no effect: " + (
        row.effect.text
    )
    (unknown,) = load_settings({f"OPTION_{row.name.upper()}": "7"}, kinds=()).warnings
    assert "is not known and has no effect" in unknown


CAPTURE = "cudagraph_capture_sizes"
CASES = (
    Row("paged_attention", "true"),
    Row("paged_attention", "false", warns=True),
    *(
        Row(name, "7", warns=True, warns_with=CAPTURE)
        for name in ("max_seq_len_to_capture", "max_context_len_to_capture", "cuda_graph_sizes")
    ),
    Row("triangular_masking", "true", warns=True),
    Row("swap_space", "7", warns=True),
)


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.id)
def test_option_in_a_file(row: Row, explained: ExplainRun) -> None:
    """As `explain` shows it; a value that asks for what is always so draws no word."""
    check_row(row, explained)


def test_it_stays_a_warning_in_strict_mode(explained: ExplainRun) -> None:
    """Strict means unknown names only."""
    run = explained("option.swap_space=4", "", "--strict")
    assert (run.exit_code, len(run.warnings)) == (0, 1)


@pytest.mark.parametrize("row", ROWS.server, ids=lambda row: row.name)
def test_key_of_the_java_server_draws_no_word(row: Option) -> None:
    """Its files are full of them."""
    environ = {f"SERVING_{row.name.upper()}": "7"}
    assert load_settings(environ).warnings == ()
    assert len(load_settings(environ, kinds=()).warnings) == 1


def test_nothing_here_has_an_effect() -> None:
    """What has one belongs to the core, or to the extra that reads it."""
    rows = (*ROWS.options, *ROWS.server)
    assert {row.effect.word for row in rows} == {EffectWord.WARNS, EffectWord.NONE}
    assert not ROWS.variables
