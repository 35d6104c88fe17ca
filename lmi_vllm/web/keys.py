"""The typed keys under which the application and its requests keep things."""

from typing import TYPE_CHECKING, Final

from aiohttp import web

from lmi_vllm.errors import Dialect
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.telemetry.records import RequestRecord
from lmi_vllm.web.row_writer import WriteTurn

if TYPE_CHECKING:
    from lmi_vllm.web.app import WebOptions
    from lmi_vllm.web.routes import RouteGroup

SERVICE: Final = web.AppKey("service", InferenceService)
OPTIONS: "Final[web.AppKey[WebOptions]]" = web.AppKey("options")
GROUPS: "Final[web.AppKey[tuple[RouteGroup, ...]]]" = web.AppKey("groups")
WRITE_TURN: Final = web.AppKey("write_turn", WriteTurn)
REQUEST_ID: Final = web.RequestKey("request_id", str)
RECORD: Final = web.RequestKey("record", RequestRecord)
# The response whose status line is on its way.
BEGUN: Final = web.RequestKey("begun", web.StreamResponse)
# The dialect of a body, on a path that several share.
DIALECT: Final = web.RequestKey("dialect", Dialect)
# The answer is another process's, headers and all.
FORWARDED: Final = web.RequestKey("forwarded", bool)
