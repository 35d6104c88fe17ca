"""EMF lines on stdout, SageMaker's telemetry file and `log_request_metric`, of a real process."""

import json
from pathlib import Path

from integration.client import call, wait_until
from integration.conftest import StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.unit.features.exporters.test_emf import parsed


def test_exporters_count_the_same_requests(server_process: StartServer, tmp_path: Path) -> None:
    """Five requests and a drain: every line is well-formed, the counts add up."""
    model, telemetry = tmp_path / "model", tmp_path / "telemetry"
    model.mkdir()
    text = f"option.model_id={DEMO_MODEL_DIR}\nlog_request_metric=true\nmetrics_aggregation=5\n"
    (model / "serving.properties").write_text(text)
    environ = {
        "LMI_METRICS_EMF": "true",
        "LMI_METRICS_EMF_INTERVAL": "0.2",
        "LMI_METRICS_EMF_NAMESPACE": "team/llm",
        "SM_TELEMETRY_LOG_REV_2022_12": str(telemetry),
        "OPTION_PREDICT_TIMEOUT": "3",
        "LMI_SCRIPTED_SECONDS_PER_TOKEN": "0.01",
    }
    server = server_process(
        "-s", str(model), "--port", "0", "--engine", "scripted", environ=environ
    )
    url = server.url_when_ready(20)
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 4}}
    for _ in range(5):
        assert call(url, "/invocations", body).status == 200
    too_slow = body | {"parameters": {"max_new_tokens": 2000}}
    assert call(url, "/invocations", too_slow).status == 500
    assert wait_until(lambda: "TokenThroughput" in server.stderr, 5)
    server.process.terminate()
    assert server.wait_exit() == 0
    lines = [*server.seen, *server.lines.queue]
    documents = [parsed(line) for line in lines if line.startswith("{")]
    assert len(documents) > 2, lines
    requests = [one for one in documents if "Requests" in one]
    assert sum(one["Requests"] for one in requests) == 6
    assert sum(one["Response_2XX"] for one in requests) == 5
    assert sum(one["ServerError"] for one in requests) == 1
    assert sum(len(one.get("TimeToFirstToken", [])) for one in requests) >= 5
    assert sum("StartupLatency" in one for one in documents) == 1
    assert {one["_aws"]["CloudWatchMetrics"][0]["Namespace"] for one in documents} == {"team/llm"}
    assert telemetry.read_text().startswith("ModelServerError.Count:1|#lmi_vllm:")
    (figures,) = [line for line in server.log if "OutputTokens" in json.dumps(line)]
    assert figures["requests"]["OutputTokens"] == {"p50": 4.0, "p90": 4.0}
    assert "not available yet" not in server.stderr
