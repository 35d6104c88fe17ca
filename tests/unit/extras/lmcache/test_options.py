"""What `lmcache_auto_config` becomes; the core alone would warn that it needs this extra."""

from tests.unit.config.test_option_tables import ABSENT, Row, check_row
from tests.unit.conftest import ExplainRun

CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def test_auto_config_is_a_connector(explained: ExplainRun) -> None:
    """On one copy of the model."""
    becomes = {"kv_transfer_config": CONNECTOR, "data_parallel_size": ABSENT}
    check_row(Row("lmcache_auto_config", "true", becomes), explained)
