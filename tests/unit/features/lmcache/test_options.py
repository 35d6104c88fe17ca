"""What `lmcache_auto_config` becomes."""

import pytest

from tests.unit.config.test_option_tables import ABSENT, Row, check_row
from tests.unit.conftest import ExplainRun

CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


CASES = (
    Row("kv_transfer_config", '{"kv_connector": "X", "kv_role": "kv_both"}',
        {"kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_both"}}),
    Row("kv_transfer_config", '{"kv_connector": "X"}', fails="kv_role"),
    Row("lmcache_auto_config", "true", fails="lmcache_config_file",
        also="option.lmcache_config_file=l.yaml"),
    Row("lmcache_auto_config", "true", fails="enable_expert_parallel",
        also="option.enable_expert_parallel=true"),
    Row("lmcache_auto_config", "true", fails="maxWorkers", also="maxWorkers=2"),
)  # fmt: skip


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.id)
def test_option_becomes_an_argument(row: Row, explained: ExplainRun) -> None:
    """Or says what it excludes."""
    check_row(row, explained)


def test_auto_config_is_a_connector(explained: ExplainRun) -> None:
    """On one copy of the model."""
    becomes = {"kv_transfer_config": CONNECTOR, "data_parallel_size": ABSENT}
    check_row(Row("lmcache_auto_config", "true", becomes), explained)
