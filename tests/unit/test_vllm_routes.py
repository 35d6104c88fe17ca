"""config/vllm-routes/: what is done with each route that a release of vLLM can have."""

import re
import tomllib

from lmi_vllm.assembly import create_app
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import RouteKind
from tests.support.vllm_routes import SCRIPTS, script

PAGE = script("vllm_routes_page")


def test_every_recorded_route_has_an_entry_and_the_other_way_round() -> None:
    """A route of a new release is decided on before the release is allowed."""
    recorded = {path for routes in PAGE.recorded().values() for path in routes}
    assert sorted(recorded ^ PAGE.answers().keys()) == []


def test_every_release_that_is_allowed_is_recorded() -> None:
    """The range of pyproject.toml and the records are the same."""
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    (requirement,) = project["project"]["optional-dependencies"]["cpu"]
    low, high = map(int, re.findall(r"0\.(\d+)", requirement))
    assert list(PAGE.recorded()) == [f"0.{minor}" for minor in range(low, high)]


def test_route_entry_names_its_handler_and_reason() -> None:
    """What goes to vLLM says what it does; what does not says the reason."""
    for path, row in PAGE.answers().items():
        if row["by"] == "bridge":
            assert RouteKind(row["acts"]), path
        else:
            assert (row["by"] in ("ours", "refused"), bool(row["why"])) == (True, True), path


def test_routes_marked_own_exist_in_this_server() -> None:
    """Of its own or of a feature's; what is refused or handed on has none."""
    app = create_app(InferenceService(RequestQueue(Lifecycle())))
    own = {_unnamed(resource.canonical) for resource in app.router.resources()}
    ours = {path for path in PAGE.answers() if _unnamed(path) in own}
    said = {path for path, row in PAGE.answers().items() if row["by"] == "ours"}
    assert ours ^ said == {"/tokenize"}  # TGI's bodies are ours, vLLM's are handed on


def _unnamed(path: str) -> str:
    return re.sub(r"{\w+}", "{}", path)
